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


def test_what_an_override_means():
  floats = "params=float32,compute=float16,output=float32"
  for expected, specs in (
    (FP32, ("fp32", "float32", "f32", "full", jnp.float32, jmp.get_policy("full"))),
    (FP32, ({"compute_dtype": "float32"},)),
    (FP32, (floats.replace("float16", "float32"), mpjax.get_policy("fp32").to_dict())),
    (BF16, ("bf16", "bfloat16", "p=f32,c=bf16", {"base": "fp8", "fp8": None})),
    (FP16, ("fp16", "mixed_float16", "16-mixed", "f16", np.dtype("float16"), floats, {"base": "fp16"})),
    # Its loss scaling is that of a run.
    (FP16, ("loss_scaling=none,c=f16", mpjax.get_policy("fp16"), {"base": "fp16", "loss_scaling": None})),
    (FP16, (mpjax.get_policy("float16"), {"base": "bf16", "compute": "float16"})),
    (Override("bfloat16", fp8=True), ("fp8", {"base": "fp8", "fp8": {}})),
    (Override("float16", fp8=True), ({"base": "fp8", "compute_dtype": "float16"},)),
    (Override(fp8=False), ({"fp8": None},)),
    (Override(loop_carry="float32"), ({"loop_carry": "float32"},)),
    (Override("bfloat16", recompute="nothing"), ({"base": "bf16", "recompute": "nothing"},)),
  ):
    for spec in specs:
      override = read(spec)
      assert override == expected, spec
      assert read(override.to_dict()) == override, spec


def test_what_cannot_be_honoured_for_a_module_is_named():
  of = lambda base, **fields: {"base": base, **fields}
  whole = mpjax.get_policy
  for field, specs in {
    "matmul_precision": (of("fp32", matmul_precision="highest"), "tf32"),
    "accum_dtype": (of("fp32", accum_dtype="float32"),),
    "grad_dtype": (of("bf16", grad_dtype="bfloat16"),),
    "loss_scaling": (of("fp32", loss_scaling="dynamic"), "c=f16,loss_scaling=dynamic"),
    "loss_scaling=": (whole(of("fp16", loss_scaling=8)),),
    "reduce_dtype": (of("bf16", reduce_dtype="bfloat16"), whole(of("bf16", reduce_dtype="float64"))),
    "optimizer_dtype": (of("bf16", optimizer_dtype="float32"),),
    "autocast": (of("bf16", autocast=False),),
    "overrides": (of("bf16", overrides={"x": "fp32"}),),
    "output_dtype": (of("bf16", output="float16"),),
    "param_dtype": ({"param_dtype": "bfloat16"}, "p=bf16", jmp.get_policy("p=bf16,o=f32")),
    "param_dtype|optimizer_dtype": ("bf16_pure",),
    "fp8": (of("fp8", fp8={"recipe": "delayed"}), of("fp8", fp8="current"), of("fp8", compute="float32")),
    "fp8=": (whole(of("fp8", fp8={"margin": 1})),),
    "compute_dtype": ({"compute_dtype": "float64"}, "float64", {}),
    "loop_carry": ({"loop_carry": "float64"},),
    "recompute": ({"recompute": "everything"},),
    "did you mean 'loop_carry'": ({"loop_carri": "float32"},),
    "NoneType": (None,),
  }.items():
    for spec in specs:
      for read_it in (read, lambda spec: mpjax.autocast(jnp.dot, "bf16", overrides={"head": spec})):
        with pytest.raises(ValueError, match=f"override 'head'.*({field})"):
          read_it(spec)


def test_the_first_of_two_overrides_for_one_pattern_holds():
  pairs = [("head", "fp32"), ("other", "bf16"), ("head", "fp16")]
  assert parse_overrides(pairs) == (("head", FP32), ("other", BF16))


def test_an_override_that_sets_no_dtype_computes_as_the_policy_says():
  def fun(x):
    with jax.named_scope("head"):
      return x @ x

  x = np.ones((4, 4), np.float32)
  for overrides in ({"head": {"loop_carry": "float32"}}, {"head": {"fp8": None}}):
    program = jax.make_jaxpr(mpjax.autocast(fun, "bf16", overrides=overrides))(x)
    assert "bf16[4,4] = dot_general" in str(program)
