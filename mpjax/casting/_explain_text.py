"""Explanations as tables, policies side by side: what is float32 and why, then what it costs."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mpjax._render.plain_text import bytes_text, with_prefix
from mpjax._render.text_sections import (
  TextColumn,
  TextRow,
  TextSection,
  beside,
  of_each,
  print_sections,
  sections_text,
)
from mpjax.casting._decision_table import IN_REGION
from mpjax.casting._explained import ExplainedOperation, ExplainedProgram
from mpjax.casting._fp8_products import NOT_FP8
from mpjax.jaxpr import layer_pattern, merged_path

if TYPE_CHECKING:
  import rich.console

_MOST_NAMES = 6  # of operations in a cell
_ROOT = "(no module)"
_FIGURES = frozenset(
  {"operations", "in float32", "cast", "FLOPs", "number", "kept", "recomputed", "behind a barrier"}
)

_Item = TypeVar("_Item")


def explanations_text(explanations: Sequence[ExplainedProgram]) -> str:
  """Returns explanations side by side as plain text, at most 116 columns wide."""
  return sections_text(sections_of(explanations))


def print_explanations(explanations: Sequence[ExplainedProgram], console: rich.console.Console) -> None:
  """Prints explanations of one program under several policies, side by side, in the width of a console."""
  print_sections(sections_of(explanations), console)


def sections_of(explanations: Sequence[ExplainedProgram]) -> Iterator[TextSection]:
  """Yields the tables of explanations side by side."""
  labels = [one.policy.full_label for one in explanations]
  each: Sequence[Callable[[ExplainedProgram], TextSection | None]]
  each = (_kernels, _full, _what_follows, _not_fp8, _fragile, _unknown, _islands, _carries, _gathers)
  summaries = [_summary(one) for one in explanations]
  if len(explanations) == 1:
    yield TextSection(summaries[0])
  else:
    yield _compared(explanations)
  for section in each:
    yield from of_each(labels, map(section, explanations))
  yield from [_modules(explanations[0])] if len(explanations) == 1 else [_compared_modules(explanations)]


def _summary(one: ExplainedProgram) -> str:
  by_dtype = sorted(one.matrix_flops().items(), key=lambda item: -item[1])
  flops = ", ".join(f"{dtype} {with_prefix(n, 'FLOP')} ({_share(one, dtype)})" for dtype, n in by_dtype)
  casts = sum(row.casts for row in one.rows)
  return (
    f"policy {one.policy.full_label}: {len(one.rows)} operations, {casts} casts "
    f"({bytes_text(sum(row.cast_bytes for row in one.rows))}), {_island_count(one)} float32 islands; "
    f"matrix FLOPs: {flops or 'none'}"
  )


def _compared(explanations: Sequence[ExplainedProgram]) -> TextSection:
  """Returns the figures of several policies, a column each."""

  def row(name: str, figure: Callable[[ExplainedProgram], str]) -> TextRow:
    return TextRow([name, *map(figure, explanations)])

  dtypes = dict.fromkeys(dtype for one in explanations for dtype in one.matrix_flops())
  rows = [row("FLOPs of products", lambda one: with_prefix(sum(one.matrix_flops().values()), "FLOP"))]
  rows += [row(f"  {dtype}", functools.partial(_share, dtype=dtype)) for dtype in dtypes]
  others = [
    row("operations", lambda one: str(len(one.rows))),
    row("  in float32", lambda one: str(sum(map(_is_full, one.rows)))),
    row("float32 islands", lambda one: str(_island_count(one))),
    row("  kept for backward", lambda one: bytes_text(sum(i.kept_bytes for i in one.islands))),
    row("casts", lambda one: str(sum(r.casts for r in one.rows))),
    row("  bytes written", lambda one: bytes_text(sum(r.cast_bytes for r in one.rows))),
  ]
  return beside("What runs in which dtype", [one.policy.full_label for one in explanations], [rows, others])


def _kernels(one: ExplainedProgram) -> TextSection | None:
  """Returns the kernels, those that are alike in one row."""
  kernels = [row for row in one.rows if row.operands]
  alike = _grouped(kernels, lambda row: (layer_pattern(row.path), row.primitive, row.operands, row.why))
  names = _merged_names([[row.path for row in group] for group in alike], _paths(one))
  rows = []
  for group, name in zip(alike, names, strict=True):
    flops = sum(row.flops for row in group)
    cells = [name, group[0].primitive, str(len(group)), ", ".join(group[0].operands)]
    rows.append(TextRow([*cells, with_prefix(flops, "FLOP") if flops else "", group[0].why]))
  heads = ("module", "kernel", "number", "operands", "FLOPs", "because")
  return TextSection("Kernels", _columns(*heads), [rows]) if rows else None


def _full(one: ExplainedProgram) -> TextSection | None:
  """Returns what is denied half precision, and why: what decides where islands are."""
  decided = (row for row in one.rows if row.why != IN_REGION)  # those dtypes are the program's own
  rows = [row for row in decided if _is_full(row) and row.list != "infer" and not row.operands]
  return None if _all_float32(one) else _reasons(one, "In float32, and why", rows)


def _what_follows(one: ExplainedProgram) -> TextSection | None:
  """Returns the operations that are float32 since those beside them are, by rule and reason."""
  by_reason: dict[tuple[str, str], list[ExplainedOperation]] = {}
  for row in one.rows:
    if _is_full(row) and row.list == "infer":
      by_reason.setdefault((row.rule, row.why), []).append(row)
  if _all_float32(one) or not by_reason:
    return None
  rows = []
  for (rule, why), found in sorted(by_reason.items(), key=lambda item: -len(item[1])):
    groups = _grouped([row.path for row in found], lambda path: layer_pattern(path))
    names = _merged_names(groups, _paths(one))
    rows.append(TextRow([rule, why, str(len(found)), ", ".join(names)]))
  return TextSection("In float32 with them", _columns("rule", "because", "operations", "module"), [rows])


def _not_fp8(one: ExplainedProgram) -> TextSection | None:
  rows = [row for row in one.rows if row.flops and row.why.startswith(NOT_FP8)]
  return _reasons(one, "Products not in FP8, and why", rows, NOT_FP8)


def _reasons(
  one: ExplainedProgram, title: str, rows: Iterable[ExplainedOperation], prefix: str = ""
) -> TextSection | None:
  """Returns why operations run in their dtype, for reasons that start so; modules that are alike once."""
  of_module: dict[str, dict[str, list[str]]] = {}
  for row in rows:
    of_module.setdefault(row.path, {}).setdefault(row.why.removeprefix(prefix), []).append(row.primitive)
  alike = _grouped(of_module, lambda path: (layer_pattern(path), str(of_module[path])))
  lines = []
  for paths, name in zip(alike, _merged_names(alike, _paths(one)), strict=True):
    for i, (why, names) in enumerate(of_module[paths[0]].items()):
      lines.append(TextRow([name if i == 0 else "", _counted(names), why]))
  return TextSection(title, _columns("module", "primitives", "because"), [lines]) if lines else None


def _fragile(one: ExplainedProgram) -> TextSection | None:
  """Returns what half precision may take away, the lines of a module that are alike together."""
  alike = _grouped(one.fragile, lambda found: (layer_pattern(found.path), found.primitive, found.why))
  names = _merged_names([[found.path for found in group] for group in alike], _paths(one))
  rows = [
    TextRow([name, group[0].primitive, ", ".join(dict.fromkeys(found.line for found in group)), group[0].why])
    for group, name in zip(alike, names, strict=True)
  ]
  columns = _columns("module", "primitive", "line", "because")
  return TextSection("Fragile in half precision, and why", columns, [rows]) if rows else None


def _unknown(one: ExplainedProgram) -> TextSection | None:
  if not one.unknown:
    return None
  return TextSection(f"unknown primitives, left in the dtypes of the program: {', '.join(one.unknown)}")


def _islands(one: ExplainedProgram) -> TextSection | None:
  """Returns what islands cost, those of layers that are alike in one row, with the sums of all."""
  alike = _grouped(
    one.islands, lambda i: (layer_pattern(i.path), i.operations, i.copied, i.kept_bytes, i.times)
  )
  names = _merged_names([[island.path for island in group] for group in alike], _paths(one))
  rows = []
  for group, name in zip(alike, names, strict=True):
    first, count = group[0], len(group)
    kept = bytes_text(count * first.kept_bytes) + (f" in {first.kept_in}" if first.kept_in else "")
    again = _counted([*first.copied, *first.operations])
    sizes = bytes_text(count * first.recomputed_bytes), bytes_text(count * first.fenced_bytes)
    rows.append(TextRow([name, str(count), again, kept, *sizes]))
  heads = ("module", "number", "computed again", "kept", "recomputed", "behind a barrier")
  title = "Float32 islands: kept for the backward pass, and computed again there"
  return TextSection(title, _columns(*heads), [rows]) if rows else None


def _carries(one: ExplainedProgram) -> TextSection | None:
  held = lambda carry: f"{carry.primitive} {carry.dtype}[{','.join(map(str, carry.shape))}]"
  alike = _grouped(one.carries, lambda carry: (layer_pattern(carry.path), held(carry), carry.why))
  every = [carry.path for carry in one.carries]
  names = _merged_names([[carry.path for carry in group] for group in alike], every)
  rows = [TextRow([name, held(group[0]), group[0].why]) for group, name in zip(alike, names, strict=True)]
  return TextSection("Loop carries", _columns("carry", "held in", "because"), [rows]) if rows else None


def _gathers(one: ExplainedProgram) -> TextSection | None:
  crossed = lambda gather: (layer_pattern(gather.path), gather.shape, gather.dtype)
  alike = _grouped(one.gathers, crossed)
  every = [gather.path for gather in one.gathers]
  names = _merged_names([[gather.path for gather in group] for group in alike], every)
  rows = [
    TextRow([name, f"{group[0].kept}[{','.join(map(str, group[0].shape))}]", group[0].dtype])
    for group, name in zip(alike, names, strict=True)
  ]
  columns = _columns("parameter", "kept", "gathered in")
  return TextSection("Parameters gathered over fsdp", columns, [rows]) if rows else None


def _modules(one: ExplainedProgram) -> TextSection:
  """Returns what each module has of operations, casts and FLOPs, modules that are alike together."""
  rows = []
  for name, found in _by_module(one):
    flops, cast = sum(row.flops for row in found), sum(row.cast_bytes for row in found)
    dtypes = dict.fromkeys(row.after for row in found if row.flops)
    cells = [name, str(len(found)), str(sum(map(_is_full, found)) or "")]
    cells += [
      bytes_text(cast) if cast else "",
      with_prefix(flops, "FLOP") if flops else "",
      ", ".join(dtypes),
    ]
    rows.append(TextRow(cells))
  heads = ("module", "operations", "in float32", "cast", "FLOPs", "products in")
  return TextSection("Modules", _columns(*heads), [rows])


def _compared_modules(explanations: Sequence[ExplainedProgram]) -> TextSection:
  """Returns the dtype of the products of each module, and how much else is float32, a column a policy."""
  of_policy = [dict(_by_module(one)) for one in explanations]
  names = dict.fromkeys(name for modules in of_policy for name in modules)

  def cell(found: Sequence[ExplainedOperation]) -> str:
    dtypes = dict.fromkeys(row.after for row in found if row.flops)
    full = sum(_is_full(row) for row in found if not row.flops)
    return " ".join(filter(None, (", ".join(dtypes), f"+{full}" if full else "")))

  rows = [TextRow([name, *(cell(modules.get(name, ())) for modules in of_policy)]) for name in names]
  lines = ["+n: other operations in float32."]
  return beside("Products by module", [one.policy.full_label for one in explanations], [rows], lines)


def _by_module(one: ExplainedProgram) -> list[tuple[str, list[ExplainedOperation]]]:
  """Returns the operations by module, those of modules together that are alike and have the same dtypes."""
  of_module: dict[str, list[ExplainedOperation]] = {}
  for row in one.rows:
    of_module.setdefault(row.path, []).append(row)

  def content(path: str) -> Hashable:
    names = collections.Counter(row.primitive for row in of_module[path])
    products = {(row.primitive, row.after) for row in of_module[path] if row.flops}
    return layer_pattern(path), frozenset(names.items()), frozenset(products)

  alike = _grouped(of_module, content)
  names = _merged_names(alike, _paths(one))
  return [
    (name, [row for path in paths for row in of_module[path]])
    for name, paths in zip(names, alike, strict=True)
  ]


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
  """Returns items with equal keys together, in the order of the first of each."""
  groups: dict[Hashable, list[_Item]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return list(groups.values())


def _merged_names(groups: Sequence[Sequence[str]], every: Sequence[str]) -> list[str]:
  return [merged_path(set(paths), every) or _ROOT for paths in groups]


def _paths(one: ExplainedProgram) -> list[str]:
  return list(dict.fromkeys(row.path for row in one.rows))


def _is_full(row: ExplainedOperation) -> bool:
  return row.after == row.before == "float32"


def _all_float32(one: ExplainedProgram) -> bool:
  """Returns whether the policy computes in float32 throughout, for which there is nothing to explain."""
  return one.policy.compute_dtype == np.float32 and not one.policy.overrides


def _island_count(one: ExplainedProgram) -> int:
  return len({row.island for row in one.rows if row.island is not None})


def _share(one: ExplainedProgram, dtype: str) -> str:
  """Returns the share of the products' FLOPs that are in a dtype."""
  flops = one.matrix_flops()
  return f"{flops[dtype] / sum(flops.values()):.0%}" if flops.get(dtype) else "-"


def _counted(names: Sequence[str]) -> str:
  """Returns names as text, each once with its count; no more than the first few of them."""
  count = collections.Counter(names)
  counted = [f"{name} x{n}" if n > 1 else name for name, n in count.items()]
  return ", ".join(counted[:_MOST_NAMES] + ["..."] * (len(counted) > _MOST_NAMES))


def _columns(*headings: str) -> list[TextColumn]:
  """Returns columns with these headings: figures flush right, words folded."""
  return [TextColumn(name, right=name in _FIGURES, folds=name not in _FIGURES) for name in headings]
