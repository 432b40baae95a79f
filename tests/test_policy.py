"""Policies: every way in and out, equality, and what a cast touches."""

import dataclasses
import json
import subprocess
import sys
import unittest

import jax
import jax.numpy as jnp
import jmp
import jmp._src.policy_test as jmp_tests
import ml_dtypes
import numpy as np
import pytest
import yaml
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax

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
  assert mpjax.get_policy("fp8").fp8 == (("recipe", "current"),)
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
    ("fp61", ["fp61", "fp16", "auto", "did you mean 'fp16'"]),
    ("compute_float16", ["Unknown dtype", "compute_float16"]),
    ("c=f17", ["f17", "float16"]),
    ("compte=f16", ["'compte'", "compute", "did you mean 'compute'"]),
    ("c=f16,compute=f32", ["compute", "twice"]),
    ("c=int32", ["int32"]),
    ("c=", ["''"]),
    ({"base": "fp99"}, ["fp99"]),
    ({"compute_dtyp": "f16"}, ["compute_dtyp", "did you mean 'compute_dtype'"]),
    ({"compute": "f16", "compute_dtype": "f32"}, ["compute_dtype", "repeats"]),
    ({"compute_dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
    ({"compute_dtype": jnp.float8_e4m3fn}, ["float8_e4m3fn", "fp8"]),
    ({"compute_dtype": 16}, ["16"]),
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
)
POLICIES = st.builds(
  mpjax.Policy,
  *[st.sampled_from(NAMES)] * 3,
  reduce_dtype=st.sampled_from([None, *NAMES]),
  accum_dtype=st.sampled_from([None, "float32"]),
  optimizer_dtype=st.sampled_from([None, "float32", "bfloat16"]),
  matmul_precision=st.sampled_from([None, "highest", "tensorfloat32"]),
  loss_scaling=SCALINGS,
  fp8=st.sampled_from([(), (("margin", 0), ("recipe", "delayed"))]),
  overrides=st.sampled_from([(), (("head", "fp32"), (".*/norm", "p=f32,c=f32"))]),
)


@settings(max_examples=50, deadline=None)
@given(policy=POLICIES)
def test_policies_round_trip_as_strings_mappings_yaml_and_json(policy):
  assert triple(mpjax.get_policy(str(policy))) == triple(policy)
  for data in (
    policy.to_dict(),
    yaml.safe_load(yaml.safe_dump(policy.to_dict())),
    json.loads(json.dumps(policy.to_dict())),
  ):
    again = mpjax.get_policy(data)
    assert again == policy
    assert hash(again) == hash(policy)


def test_equality_with_jmp_and_within():
  ours, theirs = mpjax.get_policy("bf16"), jmp.get_policy("c=bf16,o=f32")
  assert ours == theirs
  assert theirs == ours
  assert hash(ours) == hash(mpjax.get_policy(theirs))
  assert ours != jmp.get_policy("half")
  assert mpjax.get_policy("fp16") != jmp.get_policy("c=f16,o=f32")  # the loss scaling differs
  assert mpjax.get_policy("tf32") != mpjax.get_policy("fp32")
  assert ours != "bf16"
  assert {ours: 1}[mpjax.get_policy("p=f32,c=bf16,o=f32")] == 1
  assert ours.with_output_dtype(jnp.float16).output_dtype == "float16"


def test_policies_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    mpjax.get_policy("bf16").compute_dtype = jnp.float32


def test_casts_touch_floating_leaves_alone():
  tree = {
    "f32": jnp.ones(2),
    "f64": np.ones(2),
    "f16": jnp.ones(2, jnp.float16),
    "scalar": np.float32(1),
    "shape": jax.ShapeDtypeStruct((3,), jnp.float32),
    "int": jnp.arange(2),
    "bool": jnp.ones(2, bool),
    "key": jax.random.key(0),
    "old key": jax.random.PRNGKey(0),
    "complex": jnp.ones(2, jnp.complex64),
    "float0": np.zeros(2, jax.dtypes.float0),
    "fp8": jnp.ones(2, jnp.float8_e4m3fn),
    "e8m0": np.ones(2, ml_dtypes.float8_e8m0fnu),
    "python": 1.5,
    "none": None,
    "text": "x",
  }
  out = mpjax.get_policy("bf16").cast_to_compute(tree)
  changed = {"f32", "f64", "f16", "scalar", "shape"}
  for name, leaf in tree.items():
    if name in changed:
      assert out[name].dtype == jnp.bfloat16
    else:
      assert out[name] is leaf
  assert isinstance(out["f64"], np.ndarray)
  assert isinstance(out["shape"], jax.ShapeDtypeStruct)
  assert mpjax.get_policy("fp32").cast_to_param(tree)["f32"] is tree["f32"]
  assert jax.jit(mpjax.get_policy("fp16").cast_to_compute)(jnp.ones(2)).dtype == jnp.float16
  assert mpjax.get_policy("p=f32,c=f16,o=bf16").cast_to_output(jnp.ones(2)).dtype == jnp.bfloat16


def test_casts_of_nnx_keep_shared_variables_shared():
  class Tied(nnx.Module):
    def __init__(self):
      self.a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      self.b = self.a
      self.count = nnx.Variable(jnp.zeros((), jnp.int32))

  model = Tied()
  cast = mpjax.get_policy("bf16").cast_to_compute(model)
  assert cast.a is cast.b
  assert cast.a.kernel.dtype == jnp.bfloat16
  assert cast.count.dtype == jnp.int32
  assert model.a.kernel.dtype == jnp.float32
  state = mpjax.get_policy("bf16").cast_to_compute(nnx.state(model))
  assert isinstance(state, nnx.State)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"bfloat16", "int32"}


def test_casts_of_registered_pytrees():
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Layer:
    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True})

  out = mpjax.get_policy("bf16").cast_to_compute(Layer(jnp.ones(2), "layer"))
  assert (out.weight.dtype, out.name) == (jnp.bfloat16, "layer")


def test_the_policy_tests_of_jmp_pass_with_ours(monkeypatch):
  monkeypatch.setattr(jmp_tests.jmp, "get_policy", mpjax.get_policy)
  result = unittest.TestResult()
  unittest.defaultTestLoader.loadTestsFromTestCase(jmp_tests.PolicyTest).run(result)
  assert result.testsRun > 40
  assert [text for _, text in result.failures + result.errors] == []


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
"""
  subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
