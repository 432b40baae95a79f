"""Policies of what training keeps: dtypes of optimiser state, master weights and vectors."""

import jax.numpy as jnp
import pytest

import mpjax


@pytest.mark.parametrize(
  ("spec", "words"),
  [
    ({"base": "bf16", "master_weights": "int16"}, "param_dtype is float32: those are master weights"),
    ({"param_dtype": "float16", "master_weights": "int8"}, "for parameters in bfloat16"),
    ({"base": "bf16_pure", "master_weights": "int9"}, "did you mean 'int8'"),
    ({"base": "bf16", "optimizer_dtype": "int4"}, "optimizer_dtype: int4.*float64, int8, float8_e4m3fn"),
    ({"base": "bf16", "param_dtype": "int8"}, "param_dtype"),
  ],
)
def test_what_state_cannot_be_kept_in_is_refused(spec, words):
  with pytest.raises(ValueError, match=words):
    mpjax.get_policy(spec)


def test_no_master_weights_is_the_default():
  base = mpjax.get_policy("bf16_pure")
  assert mpjax.get_policy({"base": base, "master_weights": "none"}) == base


def test_vectors_have_a_dtype_of_their_own():
  tree = {"scale": jnp.ones(3), "kernel": jnp.ones((3, 3)), "steps": jnp.ones(3, jnp.int32)}
  cast = mpjax.get_policy("bf16_lean").cast_to_param(tree)
  assert {name: leaf.dtype.name for name, leaf in cast.items()} == {
    "scale": "float32",
    "kernel": "bfloat16",
    "steps": "int32",
  }
