"""Overrides: what may be set for a module, that it is honoured, and errors that name what cannot be."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import mpjax
from mpjax.policy import Override, parse_overrides

FP32, BF16, FP16 = (Override(name) for name in ("float32", "bfloat16", "float16"))


def read(spec):
  ((pattern, override),) = mpjax.get_policy({"base": "bf16", "overrides": {"head": spec}}).overrides
  assert pattern == "head"
  return override


@pytest.mark.parametrize(
  ("spec", "expected"),
  [
    ("fp32", FP32),
    ("bf16", BF16),
    ("fp16", FP16),  # its loss scaling is that of a run
    ("fp8", Override("bfloat16", fp8=True)),
    ("mixed_float16", FP16),
    ("16-mixed", FP16),
    ("float32", FP32),
    ("bfloat16", BF16),
    ("f16", FP16),
    (jnp.float32, FP32),
    (np.dtype("float16"), FP16),
    ("p=f32,c=bf16", BF16),
    ("params=float32,compute=float16,output=float32", FP16),
    ("params=float32,compute=float32,output=float32", FP32),
    ("loss_scaling=none,c=f16", FP16),
    (mpjax.get_policy("fp16"), FP16),
    (mpjax.get_policy("float16"), FP16),
    (jmp.get_policy("c=bf16,o=f32"), BF16),
    (jmp.get_policy("full"), FP32),
    ({"base": "fp16"}, FP16),
    ({"base": "fp16", "loss_scaling": None}, FP16),
    ({"base": "bf16", "compute": "float16"}, FP16),
    ({"compute_dtype": "float32"}, FP32),
    ({"base": "fp8", "fp8": {}}, Override("bfloat16", fp8=True)),
    ({"base": "fp8", "fp8": None}, BF16),
    ({"base": "fp8", "compute_dtype": "float16"}, Override("float16", fp8=True)),
    ({"fp8": None}, Override(fp8=False)),
    ({"loop_carry": "float32"}, Override(loop_carry="float32")),
    ({"base": "bf16", "recompute": "nothing"}, Override("bfloat16", recompute="nothing")),
    (mpjax.get_policy("fp32").to_dict(), FP32),
  ],
  ids=str,
)
def test_what_an_override_means(spec, expected):
  override = read(spec)
  assert override == expected
  assert read(override.to_dict()) == override


@pytest.mark.parametrize(
  ("spec", "field"),
  [
    ({"base": "fp32", "matmul_precision": "highest"}, "matmul_precision"),
    ({"base": "fp32", "accum_dtype": "float32"}, "accum_dtype"),
    ({"base": "fp32", "accum_dtype": "float64"}, "accum_dtype"),
    ({"base": "bf16", "grad_dtype": "bfloat16"}, "grad_dtype"),
    ({"base": "fp32", "loss_scaling": "dynamic"}, "loss_scaling"),
    ({"base": "fp16", "loss_scaling": 8}, "loss_scaling"),
    ({"base": "bf16", "reduce_dtype": "bfloat16"}, "reduce_dtype"),
    ({"base": "bf16", "optimizer_dtype": "float32"}, "optimizer_dtype"),
    ({"base": "bf16", "autocast": False}, "autocast"),
    ({"base": "bf16", "overrides": {"x": "fp32"}}, "overrides"),
    ({"base": "bf16", "output": "float16"}, "output_dtype"),
    ({"base": "bf16", "output": "float64"}, "output_dtype"),
    ({"param_dtype": "bfloat16"}, "param_dtype"),
    ({"base": "fp8", "fp8": {"recipe": "delayed"}}, "fp8"),
    ({"base": "fp8", "fp8": "current"}, "fp8"),
    ({"base": "fp8", "compute": "float32"}, "fp8"),
    ({"compute_dtype": "float64"}, "compute_dtype"),
    ("float64", "compute_dtype"),
    ("p=bf16", "param_dtype"),
    ("c=f16,loss_scaling=dynamic", "loss_scaling"),
    ("tf32", "matmul_precision"),
    ("bf16_pure", "param_dtype|optimizer_dtype"),
    (mpjax.get_policy({"base": "fp16", "loss_scaling": 8}), "loss_scaling"),
    (mpjax.get_policy({"base": "fp8", "fp8": {"margin": 1}}), "fp8"),
    (mpjax.get_policy({"base": "bf16", "reduce_dtype": "float64"}), "reduce_dtype"),
    (jmp.get_policy("p=bf16,o=f32"), "param_dtype"),
    ({"loop_carry": "float64"}, "loop_carry"),
    ({"recompute": "everything"}, "recompute"),
    ({"loop_carri": "float32"}, "did you mean 'loop_carry'"),
    ({}, "compute_dtype"),
    (None, "NoneType"),
  ],
  ids=str,
)
def test_what_cannot_be_honoured_for_a_module_is_named(spec, field):
  for read_it in (read, lambda spec: mpjax.autocast(jnp.dot, "bf16", overrides={"head": spec})):
    with pytest.raises(ValueError, match=f"override 'head'.*({field})"):
      read_it(spec)


def test_the_first_of_two_overrides_for_one_pattern_holds():
  pairs = [("head", "fp32"), ("other", "bf16"), ("head", "fp16")]
  assert parse_overrides(pairs) == (("head", FP32), ("other", BF16))


def test_names_of_one_dtype_make_equal_policies():
  policies = [
    mpjax.get_policy({"base": "bf16", "overrides": {"head": name}}) for name in ("fp32", "f32", "full")
  ]
  assert len(set(policies)) == 1


def test_an_override_that_sets_no_dtype_computes_as_the_policy_says():
  def fun(x):
    with jax.named_scope("head"):
      return x @ x

  x = jnp.ones((4, 4))
  for overrides in ({"head": {"loop_carry": "float32"}}, {"head": {"fp8": None}}):
    program = jax.make_jaxpr(mpjax.autocast(fun, "bf16", overrides=overrides))(x)
    assert "bf16[4,4] = dot_general" in str(program)
