"""Module paths of layers that are alike have one name, which says which layers those are."""

import pytest

from mpjax.jaxpr import layer_pattern, merged_path

BLOCKS = [f"GPT/blocks/{i}/{part}" for i in range(4) for part in ("up", "down")]
NAMES = {  # (paths, among) -> name
  "all": ([path for path in BLOCKS if path.endswith("up")], BLOCKS, "GPT/blocks/*/up"),
  "one": (["GPT/blocks/2/up"], BLOCKS, "GPT/blocks/2/up"),
  "a range": (["GPT/blocks/1/up", "GPT/blocks/2/up", "GPT/blocks/3/up"], BLOCKS, "GPT/blocks/1-3/up"),
  "some": (["GPT/blocks/3/up", "GPT/blocks/0/up"], BLOCKS, "GPT/blocks/0,3/up"),
  "without numbers": (["GPT/norm"], [*BLOCKS, "GPT/norm"], "GPT/norm"),
  "two numbers": (["net/h10/ln1", "net/h10/ln2"], ["net/h10/ln1", "net/h10/ln2"], "net/h10/ln*"),
  "none": ([""], ["", "GPT"], ""),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_name_says_which_layers_are_meant(case):
  paths, among, name = NAMES[case]
  assert merged_path(paths, among) == name


def test_layers_have_one_pattern():
  assert {layer_pattern(path) for path in BLOCKS} == {"GPT/blocks/*/up", "GPT/blocks/*/down"}
