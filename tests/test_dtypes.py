"""One tree cast like another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.dtypes import cast_like


@pytest.mark.parametrize("leaf", [jnp.float16(2), np.float16(2), 2, 2.0, True])
def test_a_leaf_gets_the_dtype_of_its_counterpart(leaf):
  assert jnp.asarray(cast_like([leaf], [jnp.float32(0)])[0]).dtype == jnp.float32


def test_what_has_the_dtype_already_is_the_same_object():
  leaves = [jnp.ones(3), jax.random.key(0), np.ones(2, np.int32), 1.5]
  others = [jnp.zeros(3), jax.random.key(1), np.zeros(2, np.int32), 2]
  assert all(a is b for a, b in zip(cast_like(leaves, others), leaves, strict=True))


def test_another_structure_is_refused():
  with pytest.raises(ValueError):
    cast_like({"a": 1}, {"b": 1})
