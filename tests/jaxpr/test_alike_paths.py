"""Module paths of layers that are alike have one name, which says which layers those are."""

from mpjax.jaxpr import layer_pattern, merged_path

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
