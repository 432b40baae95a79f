"""What the casts of a policy touch, and jmp's own tests of them."""

import unittest

import jax
import jax.numpy as jnp
import jmp._src.policy_test as jmp_tests
import ml_dtypes
import numpy as np

import mpjax


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


def test_vectors_have_a_dtype_of_their_own():
  params = {"scale": np.ones(3, np.float32), "kernel": np.ones((3, 3)), "steps": np.ones(3, np.int32)}
  out = mpjax.get_policy("bf16_lean").cast_to_param(params)
  dtypes = {name: x.dtype.name for name, x in out.items()}
  assert dtypes == {"scale": "float32", "kernel": "bfloat16", "steps": "int32"}


def test_the_policy_tests_of_jmp_pass_with_ours(monkeypatch):
  monkeypatch.setattr(jmp_tests.jmp, "get_policy", mpjax.get_policy)
  result = unittest.TestResult()
  unittest.defaultTestLoader.loadTestsFromTestCase(jmp_tests.PolicyTest).run(result)
  assert result.testsRun > 40
  assert [text for _, text in result.failures + result.errors] == []
