"""Module paths that differ only in numbers, as those of similar layers: `GPT/blocks/*/up`."""

from __future__ import annotations

import re
from collections.abc import Collection

_NUMBER = re.compile(r"\d+")


def layer_pattern(path: str) -> str:
  """Returns a module path with stars for its numbers, the same for similar layers."""
  return _NUMBER.sub("*", path)


def merged_path(paths: Collection[str], among: Collection[str]) -> str:
  """Returns one name for module paths of one pattern: `GPT/blocks/*/up`, `GPT/blocks/1-3/up`.

  Args:
    paths: at least one path; all have the same `layer_pattern`.
    among: all paths of the program. A star stands for all numbers in the paths of the pattern at that place.
  """
  pattern = layer_pattern(next(iter(paths)))
  chosen = [list(map(int, _NUMBER.findall(path))) for path in paths]
  every = [list(map(int, _NUMBER.findall(path))) for path in among if layer_pattern(path) == pattern]
  places = range(pattern.count("*"))
  names = iter([_numbers({path[i] for path in chosen}, {path[i] for path in every}) for i in places])
  return re.sub(r"\*", lambda _: next(names), pattern)


def _numbers(chosen: set[int], every: set[int]) -> str:
  if len(chosen) == 1:
    return str(*chosen)
  if chosen >= every:
    return "*"
  low, high = min(chosen), max(chosen)
  return f"{low}-{high}" if len(chosen) == high - low + 1 else ",".join(map(str, sorted(chosen)))
