"""Paths of modules and leaves as text: expressions for whole components, and those alike but for numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.tree_util import KeyPath

from mpjax._types import PyTree

_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")
_NUMBER = re.compile(r"\d+")


@functools.cache
def component_regex(pattern: str) -> re.Pattern[str]:
  """Compiles a regex for `search`: `head` matches `GPT/head` and the paths below it, not `GPT/header`.

  Raises:
    ValueError: if the pattern is not a regular expression.
  """
  flags = _FLAGS.match(pattern) if isinstance(pattern, str) else None
  start = flags.end() if flags else 0
  try:
    re.compile(pattern)  # alone: an unbalanced bracket could close the one that is added
    return re.compile(rf"{pattern[:start]}(?:^|/)(?:{pattern[start:]})(?:/|$)")
  except (re.error, TypeError) as error:
    raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error


def path_text(path: KeyPath) -> str:
  """Returns a key path as rules, reports and files show it: `blocks/0/qkv/kernel`; `""` for a bare leaf."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
  """Returns each leaf of a tree with its `path_text`, in the order of `jax.tree.leaves`."""
  return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]


def parameter_of(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
  """Returns the path of the parameter that a leaf of an optimiser's state belongs to, or `None`.

  It is the longest path that the leaf's path ends with, of a parameter of the leaf's shape.

  Args:
    name: path of the leaf, as `path_text` gives it.
    shape: shape of the leaf.
    shapes: shape of each parameter, by its path; a bare array has the path `""`.
  """
  parts = name.split("/")
  ends = ("/".join(parts[i:]) for i in range(len(parts) + 1))
  return next((end for end in ends if shapes.get(end) == shape), None)


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
