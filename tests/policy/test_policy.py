"""Policies: every way in and out, equality, and names of other libraries."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.fp8 import Recipe
from mpjax.policy import Override

NAMES = ("float16", "bfloat16", "float32", "float64")


def triple(policy):
  return tuple(np.dtype(d).name for d in (policy.param_dtype, policy.compute_dtype, policy.output_dtype))


@pytest.mark.parametrize(
  ("name", "expected", "scaled"),
  [
    ("fp32", ("float32", "float32", "float32"), False),
    ("tf32", ("float32", "float32", "float32"), False),
    ("bf16", ("float32", "bfloat16", "float32"), False),
    ("fp16", ("float32", "float16", "float32"), True),
    ("fp8", ("float32", "bfloat16", "float32"), False),
    ("bf16_pure", ("bfloat16", "bfloat16", "float32"), False),
    ("bf16_lean", ("bfloat16", "bfloat16", "float32"), False),
    ("float16", ("float16", "float16", "float16"), False),
    ("full", ("float32", "float32", "float32"), False),
    ("params=float32,compute=bfloat16,output=float32", ("float32", "bfloat16", "float32"), False),
    ("p=f32,c=f16,o=full", ("float32", "float16", "float32"), False),
    ("c=bf16", ("float32", "bfloat16", "bfloat16"), False),
    ("p=f16", ("float16", "float16", "float16"), False),
    ("o=f16", ("float32", "float32", "float16"), False),
    (" p = f32 , c = bf16 ", ("float32", "bfloat16", "bfloat16"), False),
    ({"base": "fp16", "output": "bfloat16"}, ("float32", "float16", "bfloat16"), True),
    ({"compute_dtype": "bfloat16"}, ("float32", "bfloat16", "bfloat16"), False),
    ({"base": "bf16", "loss_scaling": "dynamic"}, ("float32", "bfloat16", "float32"), True),
    ({"base": "fp16", "loss_scaling": None}, ("float32", "float16", "float32"), False),
    ({"base": "fp16", "loss_scaling": "none"}, ("float32", "float16", "float32"), False),
    (jmp.Policy(jnp.float32, jnp.float16, jnp.float32), ("float32", "float16", "float32"), False),
  ],
)
def test_what_a_spec_means(name, expected, scaled):
  policy = mpjax.get_policy(name)
  assert triple(policy) == expected
  assert (policy.loss_scaling is not None) == scaled
  assert isinstance(policy, jmp.Policy)
  assert mpjax.get_policy(policy) is policy


def test_presets_carry_more_than_dtypes():
  assert mpjax.get_policy("tf32").matmul_precision == "tensorfloat32"
  assert mpjax.get_policy("bf16_pure").optimizer_dtype == "float32"
  lean = mpjax.get_policy("bf16_lean")
  assert (lean.optimizer_dtype, lean.master_weights, lean.vector_dtype) == ("int8", "int8", "float32")
  assert mpjax.get_policy("fp8").fp8 == Recipe()
  assert mpjax.get_policy("fp16").loss_scaling == mpjax.LossScaling()


@pytest.mark.parametrize(
  ("backend", "compute", "scaled"),
  [
    ("tpu", "bfloat16", False),
    ("gpu", "float16", True),
    ("cuda", "float16", True),
    ("rocm", "float16", True),
    ("cpu", "bfloat16", False),
  ],
)
def test_auto_and_half_follow_the_backend(backend, compute, scaled, monkeypatch):
  policy = mpjax.get_policy("auto", backend=backend)
  assert (policy.compute_dtype, policy.loss_scaling is not None) == (compute, scaled)
  assert backend.replace("cuda", "gpu").replace("rocm", "gpu") in policy.reason
  assert mpjax.get_policy("half", backend=backend).param_dtype == (
    "bfloat16" if backend == "tpu" else "float16"
  )
  # Asked at the call, not at import.
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  assert mpjax.get_policy("auto") == policy
  assert mpjax.get_policy({"base": "auto"}) == policy


@pytest.mark.parametrize(
  ("spec", "words"),
  [
    ("float8", ["float8", "did you mean 'fp8'"]),
    ("fp61", ["fp61", "fp16", "auto", "did you mean 'fp16'"]),
    ("compute_float16", ["Unknown dtype", "compute_float16"]),
    ("c=f17", ["f17", "float16"]),
    ("compte=f16", ["'compte'", "compute", "did you mean 'compute'"]),
    ("c=f16,compute=f32", ["compute", "twice"]),
    ("c=f16,c=f32", ["'c'", "twice"]),
    ("c=f16,bf16", ["'bf16'", "key=value"]),
    ("c=f16,loss_scaling=sometimes", ["loss_scaling", "sometimes"]),
    ('c=f16,fp8={"recip":"current"}', ["recip", "did you mean 'recipe'"]),
    (jnp.float8_e4m3fn, ["float8_e4m3fn"]),
    (np.dtype(np.int32), ["int32"]),
    ("c=int32", ["int32"]),
    ("c=", ["''"]),
    ({"base": "fp99"}, ["fp99"]),
    ({"compute_dtyp": "f16"}, ["compute_dtyp", "did you mean 'compute_dtype'"]),
    ({"compute": "f16", "compute_dtype": "f32"}, ["compute_dtype", "repeats"]),
    ({"compute_dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
    ({"compute_dtype": jnp.float8_e4m3fn}, ["float8_e4m3fn", "fp8"]),
    ({"compute_dtype": 17}, ["17", "float32"]),
    ({"compute_dtype": ["f16"]}, ["['f16']", "float32"]),
    ({"matmul_precision": "fast"}, ["matmul_precision", "fast"]),
    ({"base": "fp16", "loss_scaling": True}, ["loss_scaling", "boolean"]),
    ({"base": "fp16", "loss_scaling": "sometimes"}, ["loss_scaling", "sometimes"]),
    ({"base": "fp16", "loss_scaling": {"init": 4}}, ["'init'", "init_scale"]),
    ({"base": "fp16", "loss_scaling": {"init_scale": float("inf")}}, ["init_scale", "inf"]),
    ({"base": "fp16", "loss_scaling": {"kind": "adaptive"}}, ["adaptive", "dynamic"]),
    ({"overrides": {"(": "fp32"}}, ["'('", "regular expression"]),
    ({"overrides": {"head": "fp23"}}, ["fp23"]),
    ({"overrides": ["head"]}, ["overrides", "head", "mapping"]),
    (3, ["3", "int"]),
    (None, ["None"]),
    (["fp16"], ["list"]),
  ],
)
def test_what_is_not_a_policy_is_named(spec, words):
  with pytest.raises(ValueError) as error:
    mpjax.get_policy(spec)
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("backend", ["quantum", "GPU"])
def test_unknown_backends_are_named(backend):
  with pytest.raises(ValueError, match=rf"{backend}.*cpu.*tpu"):
    mpjax.get_policy("auto", backend=backend)


def test_yaml_1_1_numbers_and_booleans():
  text = "base: fp16\nloss_scaling: {init_scale: 1e4, growth_interval: 100.0}\n"
  assert yaml.safe_load(text)["loss_scaling"]["init_scale"] == "1e4"  # the trap
  scaling = mpjax.get_policy(yaml.safe_load(text)).loss_scaling
  assert (scaling.init_scale, scaling.growth_interval) == (1e4, 100)
  with pytest.raises(ValueError, match="growth_interval=True"):
    mpjax.get_policy(yaml.safe_load("loss_scaling: {growth_interval: on}"))


FRAGMENTS = [
  ".*/",
  "head",
  r"\d+",
  "block_[0-3]",
  "(a|b)",
  '"',
  "'",
  ",",
  "=",
  ": ",
  " #",
  r"\{",
  r"\\",
  "é",
  "true",
]
PATTERNS = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map("".join)
SCALINGS = st.one_of(
  st.none(),
  st.builds(
    mpjax.LossScaling,
    init_scale=st.integers(1, 2**20),
    growth_interval=st.integers(1, 5000),
    hysteresis=st.integers(1, 4),
    backoff_factor=st.floats(0.1, 0.9),
  ),
  st.builds(mpjax.LossScaling, kind=st.just("static"), init_scale=st.floats(1e-3, 1e6)),
  st.builds(mpjax.LossScaling.preset, st.sampled_from(["grad_scaler", "megatron", "deepspeed"])),
)
RECIPES = st.one_of(
  st.none(),
  st.builds(
    Recipe,
    recipe=st.just("current"),
    margin=st.integers(0, 4),
    emulate=st.booleans(),
    pow2_scales=st.booleans(),
    min_dim=st.integers(1, 256),
    include=st.lists(PATTERNS, max_size=2).map(tuple),
    exclude=st.lists(PATTERNS, max_size=2).map(tuple),
    saved_activations=st.sampled_from(["compute", "fp8"]),
  ),
  st.builds(
    Recipe,
    recipe=st.just("delayed"),
    amax_history_len=st.integers(1, 2048),
    amax_compute=st.sampled_from(["max", "most_recent"]),
    forward_dtype=st.sampled_from(["e4m3fn", "float8_e4m3fn"]),
  ),
  st.builds(Recipe, recipe=st.just("block"), gradient_dtype=st.sampled_from(["e4m3fn", "e5m2"])),
)
OVERRIDES = st.one_of(
  st.sampled_from(["fp32", "bf16", "float16", "fp8", {"base": "fp8", "compute": "float16"}, {"fp8": None}]),
  st.builds(
    Override,
    compute_dtype=st.sampled_from([None, "float32", "bfloat16", "float16"]),
    loop_carry=st.sampled_from(["float32", "half"]),
    recompute=st.sampled_from([None, "islands", "nothing"]),
  ),
)
POLICIES = st.builds(
  mpjax.Policy,
  *[st.sampled_from(NAMES)] * 3,
  reduce_dtype=st.sampled_from([None, *NAMES]),
  accum_dtype=st.sampled_from([None, "float32"]),
  grad_dtype=st.sampled_from([None, "float32", "bfloat16"]),
  optimizer_dtype=st.sampled_from([None, "float32", "bfloat16", "int8", "float8_e4m3fn"]),
  vector_dtype=st.sampled_from([None, "float32"]),
  matmul_precision=st.sampled_from([None, "highest", "tensorfloat32"]),
  loss_scaling=SCALINGS,
  fp8=RECIPES,
  autocast=st.booleans(),
  overrides=st.lists(st.tuples(PATTERNS, OVERRIDES), max_size=3),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(policy=POLICIES)
def test_policies_round_trip_as_strings_mappings_yaml_and_json(policy):
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


@settings(max_examples=100, deadline=None)
@given(a=POLICIES, b=POLICIES)
def test_equal_policies_are_those_of_equal_strings_and_fields(a, b):
  assert (a == b) == (str(a) == str(b)) == (a.to_dict() == b.to_dict())
  assert a != b or hash(a) == hash(b)


CHANGES = {
  "param_dtype": "bfloat16",
  "compute_dtype": "float16",
  "output_dtype": "bfloat16",
  "reduce_dtype": "float64",  # which NumPy holds equal to None
  "gather_dtype": "float8_e4m3fn",
  "accum_dtype": "float32",
  "grad_dtype": "bfloat16",
  "optimizer_dtype": "float64",
  "master_weights": "int8",
  "vector_dtype": "bfloat16",
  "matmul_precision": "highest",
  "loss_scaling": {"hysteresis": 2},
  "fp8": {"margin": 1},
  "autocast": False,
  "overrides": {"head": "fp32"},
}


def test_policies_differ_if_any_field_does_that_changes_a_program_or_a_run():
  names = {field.name for field in dataclasses.fields(mpjax.Policy)}
  assert names == {*CHANGES, "name", "reason"}
  for key, value in CHANGES.items():
    base = mpjax.get_policy("bf16_pure" if key == "master_weights" else "bf16")
    changed = mpjax.get_policy({"base": base, key: value})
    assert changed != base, key
    assert len({changed, base}) == 2
    assert mpjax.get_policy(str(changed)) == changed, key
  renamed = dataclasses.replace(base, name="mine", reason="because")
  assert renamed == base
  assert hash(renamed) == hash(base)


def test_a_static_argument_keeps_policies_apart():
  product = jax.jit(
    lambda policy, x: mpjax.autocast(jnp.dot, policy)(x, x) if policy.autocast else x @ x, static_argnums=0
  )
  x = 1 + 2**-10 * jnp.eye(2)
  rounded = product(mpjax.get_policy("bf16"), x)
  assert (rounded != product(mpjax.get_policy({"base": "bf16", "autocast": False}), x)).any()


def test_no_policy_equals_one_of_jmp():
  ours, theirs = mpjax.get_policy("c=bf16,o=f32"), jmp.get_policy("c=bf16,o=f32")
  assert ours != theirs
  assert theirs != ours
  assert ours == mpjax.get_policy(theirs)
  assert ours.same_dtypes(theirs)
  assert mpjax.get_policy("bf16").same_dtypes(theirs)
  assert not ours.same_dtypes(jmp.get_policy("half"))
  assert ours != "bf16"
  assert ours.with_output_dtype(jnp.float16).output_dtype == "float16"


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


def test_a_label_that_is_written_out_says_what_auto_chose():
  assert mpjax.get_policy("auto", backend="gpu").full_label == "auto (fp16)"
  assert mpjax.get_policy("auto", backend="tpu").full_label == "auto (bf16)"
  assert mpjax.get_policy("bf16").full_label == "bf16"


def test_a_label_is_short():
  assert mpjax.get_policy({"base": "fp16"}).label == "fp16"
  assert mpjax.get_policy(mpjax.get_policy("fp8").to_dict()).label == "fp8"
  assert mpjax.get_policy("c=bf16").label == "c=bf16"
  policy = mpjax.get_policy(
    {"compute": "float16", "loss_scaling": {"init_scale": 8}, "overrides": {"a": "fp32"}}
  )
  assert policy.label == "params=float32,compute=float16,output=float16,loss_scaling=...,overrides=..."


@pytest.mark.parametrize(
  ("spec", "label"),
  [
    ({"base": "auto", "compute_dtype": "float32"}, "fp32,autocast=true"),
    ({"base": "bf16", "overrides": {"head": "fp32"}}, "bf16,overrides=..."),
    ({"base": "fp16", "loss_scaling": None}, "fp16,loss_scaling=null"),
    ({"base": "fp16", "loss_scaling": 8}, "fp16,loss_scaling=8.0"),
    ({"base": {"base": "fp8", "fp8": "delayed"}}, "bf16,fp8=delayed"),
    ("base=bf16,c=f16", "fp16,loss_scaling=null"),
  ],
)
def test_a_changed_base_lends_neither_its_name_nor_its_reason(spec, label):
  policy = mpjax.get_policy(spec, backend="cpu")
  assert (policy.name, policy.reason, policy.label) == (None, None, label)


@pytest.mark.parametrize(
  "nothing",
  [{}, {"overrides": {}}, {"compute_dtype": "bfloat16"}, {"fp8": {}}, {"loss_scaling": "none"}],
)
def test_a_mapping_that_changes_nothing_keeps_name_and_reason(nothing):
  base, policy = (mpjax.get_policy({"base": "auto"} | more, backend="cpu") for more in ({}, nothing))
  assert (policy.name, policy.label, policy.reason) == (base.name, base.label, base.reason)
  assert base.reason.startswith("auto on cpu: bf16, ")


def test_other_dtypes_take_the_name_away():
  policy = mpjax.get_policy("bf16")
  assert policy.with_output_dtype("float32") is policy
  assert policy.with_output_dtype("bfloat16").label == "bf16,output_dtype=bfloat16"


def test_static_scales_are_equal_whatever_stands_in_the_fields_that_they_do_not_use():
  plain, other = (
    mpjax.get_policy({"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": 8} | more})
    for more in ({}, {"growth_interval": 7, "max_scale": 2.0, "hysteresis": 3})
  )
  assert plain == other
  assert hash(plain) == hash(other)
  assert str(plain) == str(other)


def test_an_error_about_a_policy_does_not_print_the_whole_of_what_was_given():
  with pytest.raises(ValueError) as error:
    mpjax.get_policy([list(range(10_000))])
  assert len(str(error.value)) < 300


@pytest.mark.parametrize("nothing", [{}, [], ()])
@pytest.mark.parametrize("base", ["fp8", {"base": "fp8", "fp8": {"recipe": "delayed", "margin": 2}}])
def test_an_empty_fp8_mapping_keeps_that_of_the_base_and_null_takes_it_away(base, nothing):
  assert mpjax.get_policy({"base": base, "fp8": nothing}) == mpjax.get_policy(base)
  assert mpjax.get_policy({"base": base, "fp8": None}) == mpjax.get_policy("bf16")


@pytest.mark.parametrize(
  ("theirs", "ours"),
  [
    ("mixed_bfloat16", "bf16"),
    ("mixed_float16", "fp16"),
    ("bf16-mixed", "bf16"),
    ("16-mixed", "fp16"),
    ("bf16-true", "bf16_pure"),
    ("16-true", "params=float16,compute=float16,output=float16"),
    ("32-true", "fp32"),
    (jnp.bfloat16, "bfloat16"),
    (jnp.float16, "float16"),
    (np.float32, "fp32"),
    (jnp.dtype("bfloat16"), "bfloat16"),
  ],
)
def test_names_of_other_libraries_and_dtypes(theirs, ours):
  assert mpjax.get_policy(theirs) == mpjax.get_policy(ours)
  assert mpjax.get_policy({"base": theirs}) == mpjax.get_policy(ours)


def test_presets_are_read_once(monkeypatch):
  mpjax.get_policy("fp16")
  monkeypatch.setattr(yaml, "safe_load", None)
  assert mpjax.get_policy("fp16").loss_scaling == mpjax.LossScaling()


def test_policies_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    mpjax.get_policy("bf16").compute_dtype = jnp.float32


@pytest.mark.slow
def test_import_needs_nothing_of_a_training_run_and_touches_no_device():
  code = """
import sys
blocked = ("grain", "orbax", "tensorboard", "tensorboardX", "matplotlib", "omegaconf", "pydantic", "sklearn", "safetensors")
for name in blocked:
  sys.modules[name] = None
import mpjax, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
import optax, jax.numpy as jnp
step = mpjax.make_train_step(lambda p, b: (p * b).sum(), optax.sgd(0.1), "fp16")
step(step.init(jnp.ones(2)), jnp.ones(2))
from mpjax.train.models import GPT, ResNet, ViT
"""
  subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_the_full_label_writes_overrides_out():
  policy = mpjax.get_policy({"base": "fp16", "overrides": {".*/down": "fp32"}})
  assert policy.label == "fp16,overrides=..."
  assert policy.full_label == 'fp16,overrides={".*/down":"float32"}'
  assert mpjax.get_policy("fp16").full_label == "fp16"
