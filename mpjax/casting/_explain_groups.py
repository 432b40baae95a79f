"""Operations of an explanation that are alike, together: layers under one name, float32 ones by reason."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from mpjax.casting._decision_table import IN_REGION
from mpjax.casting._explained import ExplainedOperation, ExplainedProgram
from mpjax.casting._fp8_products import NOT_FP8
from mpjax.casting._kernels import IN_FLOAT32
from mpjax.jaxpr import layer_pattern, merged_path
from mpjax.policy import Policy

_MOST_NAMES = 6  # of operations in a cell
_MOST_LABEL = 44  # letters of a policy that is written out
_POWERS = frozenset({"integer_pow", "square"})  # next to these, another operation says more of the reason
ROOT = "(no module)"

_Item = TypeVar("_Item")


class Alike(NamedTuple):
  """Operations that run in their dtype for one reason, wherever they are.

  Attributes:
    modules: their names, such as `GPT/blocks/*`.
    names: the primitives, each once: first the one that has the reason, then others in its islands.
    why: the reason, without what float16 adds.
    share: the part of the FLOPs of all products, or of the bytes of all results.
  """

  modules: tuple[str, ...]
  names: tuple[str, ...]
  why: str
  share: float


def float32_kernels(one: ExplainedProgram) -> list[Alike]:
  """Returns the kernels in float32 with the way out of it, and their share of the FLOPs."""
  rows = [row for row in one.rows if row.why.startswith(IN_FLOAT32)]
  return _by_reason(one, [[row] for row in rows], _flops(one.rows), _flops)


def float32_products(one: ExplainedProgram) -> list[Alike]:
  """Returns the products in float32 by reason, with their share of the FLOPs."""
  rows = [row for row in one.rows if row.flops and row.after == "float32"]
  rows = [row for row in rows if not row.why.startswith(IN_FLOAT32)]
  return [] if all_float32(one) else _by_reason(one, [[row] for row in rows], _flops(one.rows), _flops)


def not_fp8(one: ExplainedProgram) -> list[Alike]:
  """Returns the products that are not FP8 under an FP8 policy by reason, with their share of the FLOPs."""
  rows = [row for row in one.rows if row.flops and row.why.startswith(NOT_FP8)]
  return _by_reason(one, [[row] for row in rows], _flops(one.rows), _flops)


def float32_others(one: ExplainedProgram) -> list[Alike]:
  """Returns what else is float32 by reason, islands as a whole, with its share of the bytes of results."""
  rows = [row for row in one.rows if is_full(row) and not row.flops and not row.operands]
  rows = [row for row in rows if row.why != IN_REGION]  # those dtypes are the program's own
  place = lambda row: row.path if row.island is None else row.island
  return [] if all_float32(one) else _by_reason(one, grouped(rows, place), _bytes(one.rows), _bytes)


def _by_reason(
  one: ExplainedProgram,
  places: Iterable[Sequence[ExplainedOperation]],
  total: int,
  size: Callable[[Iterable[ExplainedOperation]], int],
) -> list[Alike]:
  """Returns operations by reason, the largest first; those of a place have that of its largest."""
  of_reason: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}  # the size in each module
  for rows in places:
    decided = [row for row in rows if row.list != "infer"] or list(rows)
    telling = max(decided, key=lambda row: (row.primitive not in _POWERS, row.bytes))
    names = tuple(dict.fromkeys(_short(row.primitive) for row in (telling, *decided)))
    sizes = of_reason.setdefault((_reason(telling), names), {})
    sizes[telling.path] = sizes.get(telling.path, 0) + size(rows)
  found = []
  for (why, names), sizes in of_reason.items():
    modules = sorted(grouped(sizes, layer_pattern), key=lambda paths: -sum(sizes[path] for path in paths))
    share = sum(sizes.values()) / max(total, 1)
    found.append(Alike(tuple(merged_names(modules, paths_of(one))), names, why, share))
  return sorted(found, key=lambda alike: -alike.share)


def by_module(one: ExplainedProgram) -> list[tuple[str, list[ExplainedOperation]]]:
  """Returns the operations by module, those of modules together that are alike and have the same dtypes."""
  of_module: dict[str, list[ExplainedOperation]] = {}
  for row in one.rows:
    of_module.setdefault(row.path, []).append(row)

  def content(path: str) -> Hashable:
    names = collections.Counter(row.primitive for row in of_module[path])
    products = {(row.primitive, row.after) for row in of_module[path] if row.flops}
    return layer_pattern(path), frozenset(names.items()), frozenset(products)

  alike = grouped(of_module, content)
  names = merged_names(alike, paths_of(one))
  return [
    (name, [row for path in paths for row in of_module[path]])
    for name, paths in zip(names, alike, strict=True)
  ]


def grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
  """Returns items with equal keys together, in the order of the first of each."""
  groups: dict[Hashable, list[_Item]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return list(groups.values())


def merged_names(groups: Sequence[Sequence[str]], every: Sequence[str]) -> list[str]:
  """Returns one name for the module paths of each group, `every` being all paths of the program."""
  return [merged_path(set(paths), every) or ROOT for paths in groups]


def paths_of(one: ExplainedProgram) -> list[str]:
  """Returns the module paths of a program, each once."""
  return list(dict.fromkeys(row.path for row in one.rows))


def is_full(row: ExplainedOperation) -> bool:
  """Returns whether an operation is float32 under the policy, as it is in the program."""
  return row.after == row.before == "float32"


def all_float32(one: ExplainedProgram) -> bool:
  """Returns whether the policy computes in float32 throughout, for which there is nothing to explain."""
  return one.policy.compute_dtype == np.float32 and not one.policy.overrides


def named(policy: Policy) -> str:
  """Returns the name of a policy in a sentence: written out where that is short."""
  return policy.full_label if len(policy.full_label) <= _MOST_LABEL else policy.label


def first_clause(why: str) -> str:
  """Returns a reason without what follows a semicolon: what float16 adds to it."""
  return why.partition("; ")[0]


def _reason(row: ExplainedOperation) -> str:
  if row.why.startswith(IN_FLOAT32):
    return row.why.removeprefix(IN_FLOAT32)
  return first_clause(row.why.removeprefix(NOT_FP8))


def counted(names: Sequence[str]) -> str:
  """Returns names as text, each once with its count; no more than the first few of them."""
  count = collections.Counter(names)
  shown = [f"{name} x{n}" if n > 1 else name for name, n in count.items()]
  return ", ".join(shown[:_MOST_NAMES] + ["..."] * (len(shown) > _MOST_NAMES))


def _short(primitive: str) -> str:
  """Returns the name of the function that a call is of, or of the primitive."""
  return primitive.rpartition(":")[2]


def _flops(rows: Iterable[ExplainedOperation]) -> int:
  return sum(row.flops for row in rows)


def _bytes(rows: Iterable[ExplainedOperation]) -> int:
  return sum(row.bytes for row in rows)
