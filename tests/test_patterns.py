"""Paths of leaves as text, and one name for the paths of layers that are alike."""

import optax

from mpjax.patterns import layer_pattern, merged_path, named_leaves, parameter_of


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


BLOCKS = [f"GPT/blocks/{i}/{part}" for i in range(4) for part in ("up", "down")]
NAMES = [  # (paths, among, name)
  ([path for path in BLOCKS if path.endswith("up")], BLOCKS, "GPT/blocks/*/up"),
  (["GPT/blocks/2/up"], BLOCKS, "GPT/blocks/2/up"),
  (["GPT/blocks/1/up", "GPT/blocks/2/up", "GPT/blocks/3/up"], BLOCKS, "GPT/blocks/1-3/up"),
  (["GPT/blocks/3/up", "GPT/blocks/0/up"], BLOCKS, "GPT/blocks/0,3/up"),
  (["GPT/norm"], [*BLOCKS, "GPT/norm"], "GPT/norm"),
  (["net/h10/ln1", "net/h10/ln2"], ["net/h10/ln1", "net/h10/ln2"], "net/h10/ln*"),
  ([""], ["", "GPT"], ""),
]


def test_a_name_says_which_layers_are_meant():
  for paths, among, name in NAMES:
    assert merged_path(paths, among) == name, paths
  assert {layer_pattern(path) for path in BLOCKS} == {"GPT/blocks/*/up", "GPT/blocks/*/down"}
