"""The answer of `explain` in a few lines: what is half precision, what is not and why, what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpjax._render.plain_text import bytes_text, percent, with_prefix
from mpjax._render.text_sections import TEXT_WIDTH
from mpjax.casting._explain_groups import (
  Alike,
  all_float32,
  float32_others,
  float32_products,
  grouped,
  is_full,
  merged_names,
  not_fp8,
  paths_of,
)
from mpjax.casting._explained import ExplainedProgram
from mpjax.jaxpr import layer_pattern

_LINES = 11  # at most
_FEW = 2  # reasons why products are not in half precision, or not in FP8
_WHY = 64  # columns for a reason, at most


def answer_of(explanations: Sequence[ExplainedProgram], *, in_config: bool = False) -> list[str]:
  """Returns what there is to know first of one program under one or several policies.

  Args:
    explanations: one for each policy.
    in_config: whether the policy is one of a config, for the line that says how to change it.
  """
  labels = ", ".join(one.policy.label for one in explanations)
  under = f", under {labels}" if len(explanations) > 1 else ""
  first = [line for one in explanations for line in _figures(one)]
  if len(explanations) == 1:
    first += _costs(explanations[0])
  first += _reasons(explanations, float32_products, f"float32 products, by share of the FLOPs{under}:", _FEW)
  first += _reasons(explanations, not_fp8, f"Products not in FP8, by share of the FLOPs{under}:", _FEW)
  last = [
    *_merged(explanations, _fragile),
    *_merged(explanations, _unknown),
    _change(explanations, in_config),
  ]
  room = _LINES - 1 - sum(-(-len(line) // TEXT_WIDTH) for line in (*first, *last))
  title = f"float32 operations, by share of the bytes of all results{under}:"
  return [*first, *_reasons(explanations, float32_others, title, max(room, _FEW)), *last]


def _figures(one: ExplainedProgram) -> list[str]:
  """Returns the shares of the matrix FLOPs by dtype, and the note about an autocast of the function's own."""
  flops = one.matrix_flops()
  total = sum(flops.values())
  full = sum(map(is_full, one.rows))
  shares = [
    f"{percent(flops[dtype] / total)}{' of the matrix FLOPs' * (i == 0)} in {dtype}"
    for i, dtype in enumerate(sorted(flops, key=lambda dtype: -flops[dtype]))
  ]
  said = f"{', '.join(shares)} ({with_prefix(total, 'FLOP')})" if total else "no matrix products"
  precision = one.policy.matmul_precision
  said += f", precision {precision}" if precision else ""
  lead = f"policy {one.policy.full_label}: {said}; {full} of {len(one.rows)} operations in float32"
  return [lead, one.note] if one.note else [lead]


def _costs(one: ExplainedProgram) -> list[str]:
  casts = sum(row.casts for row in one.rows)
  if all_float32(one) or not (casts or one.islands):
    return ["nothing is cast"] if not casts else []
  islands = "1 float32 island keeps" if len(one.islands) == 1 else f"{len(one.islands)} float32 islands keep"
  kept = bytes_text(sum(island.kept_bytes for island in one.islands))
  written = bytes_text(sum(row.cast_bytes for row in one.rows))
  return [f"{casts} cast{'s' * (casts != 1)}, {written}; {islands} {kept} for the backward pass"]


def _reasons(
  explanations: Sequence[ExplainedProgram],
  reasons: Callable[[ExplainedProgram], list[Alike]],
  title: str,
  most: int,
) -> list[str]:
  """Returns a line for each reason, the largest first, with the share under each policy."""
  found: dict[tuple[tuple[str, ...], str], tuple[Alike, list[float]]] = {}
  for i, one in enumerate(explanations):
    for alike in reasons(one):
      _, shares = found.setdefault((alike.modules, alike.why), (alike, [0.0] * len(explanations)))
      shares[i] += alike.share
  ordered = sorted(found.values(), key=lambda item: -max(item[1]))
  if not ordered:
    return []
  shown = len(ordered) if len(ordered) <= most else most - 1
  lines = [_reason_line(shares, alike) for alike, shares in ordered[:shown]]
  if rest := ordered[shown:]:
    sums = [sum(shares) for shares in zip(*(shares for _, shares in rest), strict=True)]
    lines.append(f"{_shares(sums)}{len(rest)} other reasons")
  return [title, *lines]


def _reason_line(shares: Sequence[float], alike: Alike) -> str:
  """Returns a reason in one line: its share, where it holds, for which operations, and what it is."""
  lead, why = _shares(shares), _cut(alike.why, _WHY)
  room = TEXT_WIDTH - len(f"{lead}: : {why}")
  names = _cut(", ".join(alike.names), max(room // 2, room - len(", ".join(alike.modules))))
  return f"{lead}{_listed(alike.modules, room - len(names))}: {names}: {why}"


def _fragile(one: ExplainedProgram) -> str:
  if all_float32(one):
    return ""
  if not one.fragile:
    return "Fragile in half precision: nothing was found."
  first, count = one.fragile[0], len(one.fragile)
  operations = "1 operation" if count == 1 else f"{count} operations"
  where = f"{first.primitive} at {first.line}" + (f" in {first.path}" if first.path else "")
  return f"Fragile in half precision: {operations}; the first is {where}, {first.why}"


def _unknown(one: ExplainedProgram) -> str:
  if not one.unknown:
    return ""
  names = ", ".join(one.unknown)
  return f"Unknown primitives, left in the dtypes of the program: {names}; OpLists puts them on a list"


def _change(explanations: Sequence[ExplainedProgram], in_config: bool) -> str:
  """Returns how to change what is half precision, with a module of this program as the example."""
  one = explanations[-1]
  base = "float32" if one.policy.compute_dtype.itemsize < 4 else "bfloat16"
  module = one.fragile[0].path if one.fragile else ""
  if not module:
    products = [row for row in one.rows if row.flops and row.path]
    module = max(products, key=lambda row: row.flops).path if products else ""
  region = "a function: mpjax.full_precision or mpjax.half_precision"
  if not module:
    return f"Change {region}; a module: overrides=, with a name by jax.named_scope"
  alike = [path for path in paths_of(one) if layer_pattern(path) == layer_pattern(module)]
  [name] = merged_names([alike], paths_of(one))
  pattern = name.replace("*", ".*")
  how = f'policy.overrides: {{"{pattern}": {base}}}' if in_config else f'overrides={{"{pattern}": "{base}"}}'
  return f"Change a module: {how}; {region}"


def _merged(explanations: Sequence[ExplainedProgram], line: Callable[[ExplainedProgram], str]) -> list[str]:
  """Returns a line about each explanation; equal ones once, others with their policies."""
  said = [(one.policy.label, line(one)) for one in explanations]
  groups = grouped((pair for pair in said if pair[1]), lambda pair: pair[1])
  if len(groups) == 1 and len(groups[0]) == len(said):
    return [groups[0][0][1]]
  return [f"{', '.join(label for label, _ in group)}: {group[0][1]}" for group in groups]


def _listed(names: Sequence[str], width: int) -> str:
  """Returns as many names as there is room for, at least one, and the number of the others."""
  for shown in range(len(names), 0, -1):
    rest = f" and {len(names) - shown} more" if shown < len(names) else ""
    text = ", ".join(names[:shown]) + rest
    if len(text) <= width:
      return text
  return _cut(names[0], width - len(rest)) + rest


def _shares(shares: Sequence[float]) -> str:
  shown = ("-" if not share else f"{share:.0%}" if share >= 0.005 else "<1%" for share in shares)
  return "  " + "".join(f"{share:>4}  " for share in shown)


def _cut(text: str, width: int) -> str:
  return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."
