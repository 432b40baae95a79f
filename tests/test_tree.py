"""Paths of leaves as text, and one tree cast like another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax._tree import cast_like, named_leaves, parameter_of, path_text


def test_paths_of_dicts_sequences_and_named_tuples_are_joined():
  tree = {"blocks": [{"kernel": 1}, optax.EmptyState(), optax.ScaleByScheduleState(count=2)]}
  assert named_leaves(tree) == [("blocks/0/kernel", 1), ("blocks/2/count", 2)]


def test_a_bare_leaf_has_no_path():
  assert named_leaves(3) == [("", 3)]
  assert path_text(()) == ""


def test_none_is_a_leaf_only_where_it_is_asked_for():
  assert named_leaves({"a": None}) == []
  assert named_leaves({"a": None}, lambda x: x is None) == [("a", None)]


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


def test_a_leaf_belongs_to_the_longest_path_of_its_shape():
  shapes = {"w": (2,), "mu/w": (3,), "b/w": (2,)}
  assert parameter_of("0/mu/w", (2,), shapes) == "w"
  assert parameter_of("0/mu/w", (3,), shapes) == "mu/w"
  assert parameter_of("0/mu/b/w", (2,), shapes) == "b/w"
  assert parameter_of("0/mu/w", (4,), shapes) is None
  assert parameter_of("0/mu", (2,), {"": (2,)}) == ""
