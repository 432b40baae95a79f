"""Policies: every way in and out, equality, and names of other libraries."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
import yaml

import mpjax
from mpjax.fp8 import Recipe

F32, BF16, F16 = "float32", "bfloat16", "float16"
# Specs of one policy, its dtypes, and whether it scales the loss.
MEANINGS = [
  (("fp32", "32-true", np.float32), (F32, F32, F32), False),
  (("full",), (F32, F32, F32), False),
  (("bf16", "mixed_bfloat16", "bf16-mixed"), (F32, BF16, F32), False),
  (("fp8",), (F32, BF16, F32), False),
  (("params=float32,compute=bfloat16,output=float32", "c=bf16,o=f32"), (F32, BF16, F32), False),
  (("fp16", "mixed_float16", "16-mixed"), (F32, F16, F32), True),
  (({"base": "bf16", "loss_scaling": "dynamic"},), (F32, BF16, F32), True),
  (("p=f32,c=f16,o=full", jmp.Policy(jnp.float32, jnp.float16, jnp.float32)), (F32, F16, F32), False),
  (({"base": "fp16", "loss_scaling": None}, "base=fp16,loss_scaling=none"), (F32, F16, F32), False),
  (("bf16_pure", "bf16-true"), (BF16, BF16, F32), False),
  (("bf16_lean",), (BF16, BF16, F32), False),
  (("float16", "16-true", jnp.float16, "params=float16,compute=float16,output=float16"), (F16,) * 3, False),
  (("p=f16",), (F16, F16, F16), False),
  (("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")), (BF16, BF16, BF16), False),
  (("c=bf16", " p = f32 , c = bf16 ", {"compute_dtype": "bfloat16"}), (F32, BF16, BF16), False),
  (({"base": "fp16", "output": "bfloat16"},), (F32, F16, BF16), True),
]


def test_what_a_spec_means():
  for specs, dtypes, scaled in MEANINGS:
    first = mpjax.get_policy(specs[0])
    found = (first.param_dtype, first.compute_dtype, first.output_dtype)
    assert tuple(np.dtype(d).name for d in found) == dtypes, specs
    assert (first.loss_scaling is not None) == scaled, specs
    for spec in specs:
      policy = mpjax.get_policy(spec)
      assert policy == mpjax.get_policy({"base": spec}) == first, spec
      assert isinstance(policy, jmp.Policy), spec
      assert mpjax.get_policy(policy) is policy, spec


def test_every_preset_is_documented():
  page = (pathlib.Path(__file__).parents[2] / "docs" / "policies.md").read_text()
  for name in mpjax.policy.presets():
    assert f"| `{name}` |" in page
    assert f"`{name}`" in mpjax.get_policy.__doc__


def test_presets_carry_more_than_dtypes():
  assert mpjax.get_policy("tf32").matmul_precision == "tensorfloat32"
  short = {"bfloat16_x3": "BF16_BF16_F32_X3", "tensorfloat32_x3": "TF32_TF32_F32_X3"}
  for name, full in short.items():
    policies = [mpjax.get_policy({"base": "fp32", "matmul_precision": one}) for one in (name, full)]
    assert policies[0] == policies[1] == mpjax.get_policy(str(policies[0]))
  assert mpjax.get_policy("bf16_pure").optimizer_dtype == "float32"
  lean = mpjax.get_policy("bf16_lean")
  assert (lean.optimizer_dtype, lean.master_weights, lean.vector_dtype) == ("int8", "int8", "float32")
  assert mpjax.get_policy("fp8").fp8 == Recipe()
  assert mpjax.get_policy("fp16").loss_scaling == mpjax.LossScaling()


def test_auto_and_half_follow_the_backend(monkeypatch):
  gpu = ("gpu", F16, True, F16)
  for backend, (kind, compute, scaled, half) in {
    "tpu": ("tpu", BF16, False, BF16),
    "cpu": ("cpu", BF16, False, F16),
    **dict.fromkeys(("gpu", "cuda", "rocm"), gpu),
  }.items():
    policy = mpjax.get_policy("auto", backend=backend)
    assert (policy.compute_dtype, policy.loss_scaling is not None) == (compute, scaled), backend
    assert kind in policy.reason
    assert mpjax.get_policy("half", backend=backend).param_dtype == half
    # Asked at the call, not at import.
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    assert mpjax.get_policy("auto") == mpjax.get_policy({"base": "auto"}) == policy
  for unknown in ("quantum", "GPU"):
    with pytest.raises(ValueError, match=rf"{unknown}.*cpu.*tpu"):
      mpjax.get_policy("auto", backend=unknown)


WRONG = [
  ("float8", ["float8", "did you mean 'fp8'"]),
  ("fp61", ["fp61", "fp16", "auto", "did you mean 'fp16'"]),
  ("compte=f16", ["'compte'", "compute", "did you mean 'compute'"]),
  ("c=f16,compute=f32", ["compute", "repeats"]),
  ("c=f16,bf16", ["'bf16'", "key=value"]),
  ("c=f16,loss_scaling=sometimes", ["loss_scaling", "sometimes"]),
  ('c=f16,fp8={"recip":"current"}', ["recip", "did you mean 'recipe'"]),
  (np.dtype(np.int32), ["int32"]),
  ({"compute_dtyp": "f16"}, ["compute_dtyp", "did you mean 'compute_dtype'"]),
  ({"compute_dtype": jnp.float8_e4m3fn}, ["float8_e4m3fn", "fp8"]),
  ({"matmul_precision": "fast"}, ["matmul_precision", "fast", "bfloat16_x3"]),
  ({"base": "fp16", "loss_scaling": True}, ["loss_scaling", "boolean"]),
  ({"base": "bf16", "autocast": "yes"}, ["autocast='yes'", "true or false"]),
  ({"base": "fp16", "loss_scaling": {"init": 4}}, ["'init'", "init_scale"]),
  ({"overrides": {"(": "fp32"}}, ["'('", "regular expression"]),
  ({"base": "bf16", "master_weights": "int16"}, ["param_dtype is float32: those are master weights"]),
  ({"param_dtype": "float16", "master_weights": "int8"}, ["for parameters in bfloat16"]),
  ({"base": "bf16", "optimizer_dtype": "int4"}, ["optimizer_dtype: int4", "float64, int8, float8_e4m3fn"]),
]


@pytest.mark.parametrize(("spec", "words"), [*WRONG, ([[0] * 10_000], ["list"])], ids=lambda v: str(v)[:50])
def test_what_is_not_a_policy_is_named_in_few_words(spec, words):
  with pytest.raises(ValueError) as error:
    mpjax.get_policy(spec)
  assert [word for word in words if word not in str(error.value)] == []
  assert len(str(error.value)) < 700


def test_yaml_1_1_numbers_and_booleans():
  text = "base: fp16\nloss_scaling: {init_scale: 1e4, growth_interval: 100.0}\n"
  assert yaml.safe_load(text)["loss_scaling"]["init_scale"] == "1e4"  # the trap
  scaling = mpjax.get_policy(yaml.safe_load(text)).loss_scaling
  assert (scaling.init_scale, scaling.growth_interval) == (1e4, 100)
  with pytest.raises(ValueError, match="growth_interval=True"):
    mpjax.get_policy(yaml.safe_load("loss_scaling: {growth_interval: on}"))


PATTERNS = ("head", r".*/block_[0-3]/(a|b)", "\"',=é: #", r"\{\\d", "true")
ROUND = [
  "fp16",
  "bf16_lean",
  {"base": "fp16", "loss_scaling": {"preset": "megatron"}, "matmul_precision": "highest"},
  {"base": "float16", "loss_scaling": 0.125, "accum_dtype": "float32", "grad_dtype": "bfloat16"},
  {"base": "bf16", "overrides": dict.fromkeys(PATTERNS, "fp32"), "reduce_dtype": "float64"},
  {"base": "fp8", "fp8": {"recipe": "delayed", "margin": 2}, "optimizer_dtype": "float8_e4m3fn"},
  {"base": "bf16", "overrides": {"a": {"loop_carry": "float32", "recompute": "nothing"}, "b": {"fp8": None}}},
]


def test_policies_round_trip_as_strings_mappings_yaml_and_json():
  policies = [mpjax.get_policy(spec) for spec in ROUND]
  for policy in policies:
    for data in (
      str(policy),
      yaml.safe_load(yaml.safe_dump({"policy": str(policy)}))["policy"],
      policy.to_dict(),
      yaml.safe_load(yaml.safe_dump(policy.to_dict())),
      json.loads(json.dumps(policy.to_dict())),
    ):
      again = mpjax.get_policy(data)
      assert again == policy
      assert hash(again) == hash(policy)
  assert len({*policies}) == len({*map(str, policies)}) == len(ROUND)


def test_policies_differ_if_any_field_does_that_changes_a_program_or_a_run():
  # NumPy holds float64 equal to None.
  dtypes = {"param": BF16, "compute": F16, "output": BF16, "reduce": "float64", "gather": "float8_e4m3fn"}
  dtypes |= {"accum": F32, "grad": F32, "optimizer": "float64", "vector": BF16}
  changes = {f"{name}_dtype": dtype for name, dtype in dtypes.items()} | {
    "master_weights": "int8",
    "matmul_precision": "highest",
    "loss_scaling": {"hysteresis": 2},
    "fp8": {"margin": 1},
    "autocast": False,
    "overrides": {"head": "fp32"},
  }
  assert {field.name for field in dataclasses.fields(mpjax.Policy)} == {*changes, "name", "reason"}
  for key, value in changes.items():
    base = mpjax.get_policy("bf16_pure" if key == "master_weights" else "bf16")
    changed = mpjax.get_policy({"base": base, key: value})
    assert changed != base, key
    assert len({changed, base}) == 2
    assert mpjax.get_policy(str(changed)) == changed, key
  renamed = dataclasses.replace(base, name="mine", reason="because")
  assert renamed == base
  assert hash(renamed) == hash(base)
  with pytest.raises(dataclasses.FrozenInstanceError):
    base.compute_dtype = jnp.float32


def test_a_string_is_one_of_jmp_where_the_rest_is_at_its_defaults():
  policy = mpjax.get_policy("c=bf16,o=f32")
  assert str(policy) == "params=float32,compute=bfloat16,output=float32"
  assert policy.same_dtypes(jmp.get_policy(str(policy)))
  fp16 = "params=float32,compute=float16,output=float32,loss_scaling=dynamic,autocast=true"
  assert str(mpjax.get_policy("fp16")) == fp16
  assert mpjax.get_policy("base=fp16") == mpjax.get_policy(fp16) == mpjax.get_policy("fp16")
  policy = {"base": "fp8", "fp8": "delayed", "loss_scaling": 8, "overrides": {".*/head": "fp32"}}
  assert str(mpjax.get_policy(policy)) == (
    "params=float32,compute=bfloat16,output=float32,loss_scaling=8.0,fp8=delayed,autocast=true,"
    'overrides={".*/head":"float32"}'
  )


def test_labels_are_short_and_name_what_was_changed():
  overrides = 'overrides={".*/down":"float32"}'
  for spec, backend, label, full in (
    ("auto", "gpu", "auto", "auto (fp16)"),
    ("auto", "tpu", "auto", "auto (bf16)"),
    ("bf16", None, "bf16", "bf16"),
    ("c=bf16", None, "c=bf16", "c=bf16"),
    ({"base": "fp16", "overrides": {".*/down": "fp32"}}, None, "fp16,overrides=...", f"fp16,{overrides}"),
  ):
    policy = mpjax.get_policy(spec, backend=backend)
    assert (policy.label, policy.full_label) == (label, full)
  # A changed base lends neither its name nor its reason.
  scaled = {"compute": "float16", "loss_scaling": {"init_scale": 8}, "overrides": {"a": "fp32"}}
  for spec, label in (
    (scaled, "params=float32,compute=float16,output=float16,loss_scaling=...,overrides=..."),
    ({"base": "bf16", "overrides": {"head": "fp32"}}, "bf16,overrides=..."),
    ({"base": "fp16", "loss_scaling": None}, "fp16,loss_scaling=null"),
    ({"base": {"base": "fp8", "fp8": "delayed"}}, "bf16,fp8=delayed"),
  ):
    policy = mpjax.get_policy(spec, backend="cpu")
    assert (policy.name, policy.reason, policy.label) == (None, None, label)
  policy = mpjax.get_policy("bf16")
  assert policy.with_output_dtype("float32") is policy
  assert policy.with_output_dtype("bfloat16").label == "bf16,output_dtype=bfloat16"


def test_a_mapping_that_changes_nothing_keeps_name_and_reason():
  base = mpjax.get_policy("auto", backend="cpu")
  assert base.reason.startswith("auto on cpu: bf16, ")
  for more in ({}, {"overrides": {}}, {"compute_dtype": "bfloat16"}, {"fp8": {}}, {"loss_scaling": "none"}):
    policy = mpjax.get_policy({"base": "auto"} | more, backend="cpu")
    assert (policy.name, policy.label, policy.reason) == (base.name, base.label, base.reason), more
  for base in ("fp8", {"base": "fp8", "fp8": {"recipe": "delayed", "margin": 2}}):
    for nothing in ({}, [], ()):
      assert mpjax.get_policy({"base": base, "fp8": nothing}) == mpjax.get_policy(base), (base, nothing)
    assert mpjax.get_policy({"base": base, "fp8": None}) == mpjax.get_policy("bf16"), base
  pure = mpjax.get_policy("bf16_pure")
  assert mpjax.get_policy({"base": pure, "master_weights": "none"}) == pure
