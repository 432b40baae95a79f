"""Paths of leaves as text."""

import optax

from mpjax.patterns import named_leaves, parameter_of


def test_paths_of_dicts_sequences_and_named_tuples_are_joined():
  tree = {"blocks": [{"kernel": 1}, optax.EmptyState(), optax.ScaleByScheduleState(count=2)]}
  assert named_leaves(tree) == [("blocks/0/kernel", 1), ("blocks/2/count", 2)]
  assert named_leaves(3) == [("", 3)]
  assert named_leaves({"a": None}, lambda x: x is None) == [("a", None)]


def test_a_leaf_belongs_to_the_longest_path_of_its_shape():
  shapes = {"w": (2,), "mu/w": (3,), "b/w": (2,)}
  assert parameter_of("0/mu/w", (2,), shapes) == "w"
  assert parameter_of("0/mu/w", (3,), shapes) == "mu/w"
  assert parameter_of("0/mu/b/w", (2,), shapes) == "b/w"
  assert parameter_of("0/mu/w", (4,), shapes) is None
  assert parameter_of("0/mu", (2,), {"": (2,)}) == ""
