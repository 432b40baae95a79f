"""Explanations as tables by name, policies side by side: what is float32 and why, then what it costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mpjax._render.html_sections import Report
from mpjax._render.plain_text import bytes_text, with_prefix
from mpjax._render.text_sections import TextColumn, TextRow, TextSection, beside, of_each
from mpjax.casting._decision_table import IN_REGION
from mpjax.casting._explain_answer import answer_of
from mpjax.casting._explain_groups import (
  all_float32,
  by_module,
  counted,
  first_clause,
  grouped,
  is_full,
  merged_names,
  named,
  paths_of,
)
from mpjax.casting._explained import ExplainedOperation, ExplainedProgram
from mpjax.casting._fp8_products import NOT_FP8
from mpjax.jaxpr import layer_pattern

_FIGURES = frozenset(
  {"operations", "in float32", "cast", "FLOPs", "number", "kept", "recomputed", "behind a barrier"}
)


def side_by_side(explanations: Sequence[ExplainedProgram]) -> Report:
  """Returns explanations of one program under the policies of a config as one: an answer and tables."""
  return Report(answer_of(explanations, in_config=True), list(sections_of(explanations)))


def sections_of(explanations: Sequence[ExplainedProgram]) -> Iterator[TextSection]:
  """Yields the tables of explanations side by side; reasons that several have stand in one list."""
  labels = [one.policy.full_label for one in explanations]
  yield _totals(explanations)
  yield from of_each(labels, map(_kernels, explanations))
  yield from _reasons(explanations, "float32", "In float32, and why", _is_decided)
  yield from _what_follows(explanations)
  yield from _reasons(explanations, "fp8", "Products not in FP8, and why", _is_not_fp8, NOT_FP8)
  for section in (_fragile, _unknown, _islands, _carries, _gathers):
    yield from of_each(labels, map(section, explanations))
  yield _modules(explanations[0]) if len(explanations) == 1 else _compared_modules(explanations)


def _totals(explanations: Sequence[ExplainedProgram]) -> TextSection:
  """Returns the sums of operations, FLOPs, islands and casts, a column for each policy."""

  def row(name: str, figure: Callable[[ExplainedProgram], str]) -> TextRow:
    return TextRow([name, *map(figure, explanations)])

  dtypes = dict.fromkeys(dtype for one in explanations for dtype in one.matrix_flops())
  rows = [row("FLOPs of products", lambda one: with_prefix(sum(one.matrix_flops().values()), "FLOP"))]
  rows += [row(f"  {dtype}", functools.partial(_share, dtype=dtype)) for dtype in dtypes]
  others = [
    row("operations", lambda one: str(len(one.rows))),
    row("  in float32", lambda one: str(sum(map(is_full, one.rows)))),
    row("float32 islands", lambda one: str(len(one.islands))),
    row("  kept for backward", lambda one: bytes_text(sum(i.kept_bytes for i in one.islands))),
    row("casts", lambda one: str(sum(r.casts for r in one.rows))),
    row("  bytes written", lambda one: bytes_text(sum(r.cast_bytes for r in one.rows))),
  ]
  if any(one.fp8 for one in explanations):
    rows.append(row("  fp8", lambda one: one.fp8 or "-"))
  labels = [named(one.policy) for one in explanations]
  return beside("What runs in which dtype", labels, [rows, others], name="totals")


def _kernels(one: ExplainedProgram) -> TextSection | None:
  """Returns the kernels, those that are alike in one row."""
  kernels = [row for row in one.rows if row.operands]
  alike = grouped(kernels, lambda row: (layer_pattern(row.path), row.primitive, row.operands, row.why))
  names = merged_names([[row.path for row in group] for group in alike], paths_of(one))
  rows = []
  for group, name in zip(alike, names, strict=True):
    flops = sum(row.flops for row in group)
    cells = [name, group[0].primitive, str(len(group)), ", ".join(group[0].operands)]
    rows.append(TextRow([*cells, with_prefix(flops, "FLOP") if flops else "", group[0].why]))
  heads = ("module", "kernel", "number", "operands", "FLOPs", "because")
  return TextSection("Kernels", _columns(*heads), [rows], name="kernels") if rows else None


class _Reason(NamedTuple):
  """Why operations of a module run in their dtype: the reason without, and with what float16 adds."""

  module: str
  primitives: str
  why: str
  more: str


def _is_decided(one: ExplainedProgram, row: ExplainedOperation) -> bool:
  """Returns whether an operation is denied half precision: what decides where islands are."""
  if all_float32(one) or row.why == IN_REGION:  # in a region, dtypes are the program's own
    return False
  return is_full(row) and row.list != "infer" and not row.operands


def _is_not_fp8(one: ExplainedProgram, row: ExplainedOperation) -> bool:
  return bool(row.flops) and row.why.startswith(NOT_FP8)


def _reasons(
  explanations: Sequence[ExplainedProgram],
  name: str,
  title: str,
  belongs: Callable[[ExplainedProgram, ExplainedOperation], bool],
  prefix: str = "",
) -> Iterator[TextSection]:
  """Yields why operations run in their dtype, in one list for all policies."""
  found: dict[str, dict[tuple[str, str], dict[str, str]]] = {}  # module, (primitives, why), policy: more
  for one in explanations:
    rows = [row for row in one.rows if belongs(one, row)]
    for reason in _reasons_of(one, rows, prefix):
      of_module = found.setdefault(reason.module, {})
      of_module.setdefault((reason.primitives, reason.why), {})[one.policy.label] = reason.more
  count = len(explanations)
  lines = []
  for module, reasons in found.items():
    for i, ((primitives, why), more) in enumerate(reasons.items()):
      under = [", ".join(more) if len(more) < count else "all"] if count > 1 else []
      lines.append([module if i == 0 else "", primitives, *under, _with_more(why, more)])
  heads = ["module", "primitives", *(["under"] if count > 1 else []), "because"]
  if lines:
    yield TextSection(title, _columns(*heads), [[TextRow(line) for line in lines]], name=name)


def _reasons_of(one: ExplainedProgram, rows: Iterable[ExplainedOperation], prefix: str) -> Iterator[_Reason]:
  """Yields the reasons for operations by module; those of modules that are alike once."""
  of_module: dict[str, dict[str, list[str]]] = {}
  for row in rows:
    of_module.setdefault(row.path, {}).setdefault(row.why.removeprefix(prefix), []).append(row.primitive)
  alike = grouped(of_module, lambda path: (layer_pattern(path), str(of_module[path])))
  for paths, name in zip(alike, merged_names(alike, paths_of(one)), strict=True):
    for why, names in of_module[paths[0]].items():
      first = first_clause(why)
      yield _Reason(name, counted(names), first, why.removeprefix(first).removeprefix("; "))


def _with_more(why: str, more: dict[str, str]) -> str:
  """Returns a reason with what is added to it, and under which policies where not under all."""
  added = [text for text in dict.fromkeys(more.values()) if text]
  if not added:
    return why
  if len(added) == 1 and all(more.values()):
    return f"{why}; {added[0]}"
  said = [f"{', '.join(label for label in more if more[label] == text)}: {text}" for text in added]
  return f"{why} ({'; '.join(said)})"


def _what_follows(explanations: Sequence[ExplainedProgram]) -> Iterator[TextSection]:
  """Yields the operations that are float32 because their neighbours are, by rule and reason."""
  by_reason: dict[tuple[str, str], dict[int, list[ExplainedOperation]]] = {}
  for i, one in enumerate(explanations):
    for row in one.rows if not all_float32(one) else ():
      if is_full(row) and row.list == "infer":
        by_reason.setdefault((row.rule, row.why), {}).setdefault(i, []).append(row)
  rows = []
  for (rule, why), found in by_reason.items():
    first, alike = next(iter(found.items()))
    modules = grouped((row.path for row in alike), layer_pattern)
    names = ", ".join(merged_names(modules, paths_of(explanations[first])))
    counts = [len(found.get(i, ())) for i in range(len(explanations))]
    rows.append((max(counts), TextRow([rule, why, *(str(count or "-") for count in counts), names])))
  rows.sort(key=lambda item: -item[0])
  heads = ["operations"] if len(explanations) == 1 else [one.policy.label for one in explanations]
  columns = [TextColumn(head, right=True) for head in heads]
  columns = [*_columns("rule", "because"), *columns, *_columns("module")]
  if rows:
    yield TextSection("In float32 with them", columns, [[row for _, row in rows]], name="follows")


def _fragile(one: ExplainedProgram) -> TextSection | None:
  """Returns what half precision may take away, the lines of a module that are alike together."""
  alike = grouped(one.fragile, lambda found: (layer_pattern(found.path), found.primitive, found.why))
  names = merged_names([[found.path for found in group] for group in alike], paths_of(one))
  rows = [
    TextRow([name, group[0].primitive, ", ".join(dict.fromkeys(found.line for found in group)), group[0].why])
    for group, name in zip(alike, names, strict=True)
  ]
  columns = _columns("module", "primitive", "line", "because")
  return TextSection("Fragile in half precision, and why", columns, [rows], name="fragile") if rows else None


def _unknown(one: ExplainedProgram) -> TextSection | None:
  if not one.unknown:
    return None
  title = f"unknown primitives, left in the dtypes of the program: {', '.join(one.unknown)}"
  return TextSection(title, name="unknown")


def _islands(one: ExplainedProgram) -> TextSection | None:
  """Returns what islands cost, those of layers that are alike in one row, with the sums of all."""
  alike = grouped(
    one.islands, lambda i: (layer_pattern(i.path), i.operations, i.copied, i.kept_bytes, i.times)
  )
  names = merged_names([[island.path for island in group] for group in alike], paths_of(one))
  rows = []
  for group, name in zip(alike, names, strict=True):
    first, count = group[0], len(group)
    kept = bytes_text(count * first.kept_bytes) + (f" in {first.kept_in}" if first.kept_in else "")
    again = counted([*first.copied, *first.operations])
    sizes = bytes_text(count * first.recomputed_bytes), bytes_text(count * first.fenced_bytes)
    rows.append(TextRow([name, str(count), again, kept, *sizes]))
  heads = ("module", "number", "computed again", "kept", "recomputed", "behind a barrier")
  title = "Float32 islands: kept for the backward pass, and computed again there"
  return TextSection(title, _columns(*heads), [rows], name="islands") if rows else None


def _carries(one: ExplainedProgram) -> TextSection | None:
  held = lambda carry: f"{carry.primitive} {carry.dtype}[{','.join(map(str, carry.shape))}]"
  alike = grouped(one.carries, lambda carry: (layer_pattern(carry.path), held(carry), carry.why))
  every = [carry.path for carry in one.carries]
  names = merged_names([[carry.path for carry in group] for group in alike], every)
  rows = [TextRow([name, held(group[0]), group[0].why]) for group, name in zip(alike, names, strict=True)]
  return (
    TextSection("Loop carries", _columns("carry", "held in", "because"), [rows], name="carries")
    if rows
    else None
  )


def _gathers(one: ExplainedProgram) -> TextSection | None:
  crossed = lambda gather: (layer_pattern(gather.path), gather.shape, gather.dtype)
  alike = grouped(one.gathers, crossed)
  every = [gather.path for gather in one.gathers]
  names = merged_names([[gather.path for gather in group] for group in alike], every)
  rows = [
    TextRow([name, f"{group[0].kept}[{','.join(map(str, group[0].shape))}]", group[0].dtype])
    for group, name in zip(alike, names, strict=True)
  ]
  columns = _columns("parameter", "kept", "gathered in")
  return TextSection("Parameters gathered over fsdp", columns, [rows], name="gathers") if rows else None


def _modules(one: ExplainedProgram) -> TextSection:
  """Returns what each module has of operations, casts and FLOPs, modules that are alike together."""
  rows = []
  for name, found in by_module(one):
    flops, cast = sum(row.flops for row in found), sum(row.cast_bytes for row in found)
    dtypes = dict.fromkeys(row.after for row in found if row.flops)
    cells = [name, str(len(found)), str(sum(map(is_full, found)) or "")]
    cells += [
      bytes_text(cast) if cast else "",
      with_prefix(flops, "FLOP") if flops else "",
      ", ".join(dtypes),
    ]
    rows.append(TextRow(cells))
  heads = ("module", "operations", "in float32", "cast", "FLOPs", "products in")
  return TextSection("Modules", _columns(*heads), [rows], name="modules")


def _compared_modules(explanations: Sequence[ExplainedProgram]) -> TextSection:
  """Returns the dtype of the products of each module, and how much else is float32, a column a policy."""
  of_policy = [dict(by_module(one)) for one in explanations]
  names = dict.fromkeys(name for modules in of_policy for name in modules)

  def cell(found: Sequence[ExplainedOperation]) -> str:
    dtypes = dict.fromkeys(row.after for row in found if row.flops)
    full = sum(is_full(row) for row in found if not row.flops)
    return " ".join(filter(None, (", ".join(dtypes), f"+{full}" if full else "")))

  rows = [TextRow([name, *(cell(modules.get(name, ())) for modules in of_policy)]) for name in names]
  lines = ["+n: other operations in float32."]
  labels = [one.policy.full_label for one in explanations]
  return beside("Products by module", labels, [rows], lines, name="modules")


def _share(one: ExplainedProgram, dtype: str) -> str:
  """Returns the share of the products' FLOPs that are in a dtype."""
  flops = one.matrix_flops()
  return f"{flops[dtype] / sum(flops.values()):.0%}" if flops.get(dtype) else "-"


def _columns(*headings: str) -> list[TextColumn]:
  """Returns columns with these headings: figures flush right, words folded."""
  return [TextColumn(name, right=name in _FIGURES, folds=name not in _FIGURES) for name in headings]
