"""The answer of `explain` in a few lines: what is half precision, what is not and why, what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax._render.plain_text import bytes_text, percent, with_prefix
from mpjax._render.text_sections import ANSWER_LINES, TEXT_WIDTH, answer_lines, height
from mpjax.casting._explain_groups import (
  ROOT,
  Alike,
  all_float32,
  counted,
  float32_kernels,
  float32_others,
  float32_products,
  grouped,
  is_full,
  merged_names,
  named,
  not_fp8,
  paths_of,
)
from mpjax.casting._explained import ExplainedProgram
from mpjax.jaxpr import layer_pattern

_LEAST = 0.005  # share of a reason that has a line
_FEW = 3  # lines for products and kernels
_LEAST_ROOM = 2  # lines for reasons, where many policies stand side by side
_MOST_POLICIES = 5  # that have a line
_PATH = 40  # columns for the path of a module in a sentence
_LEAST_NAME = 12  # columns for a name, at least
_WHY, _MOST_WHY = 70, 150  # columns for a reason, at most


def answer_of(explanations: Sequence[ExplainedProgram], *, in_config: bool = False) -> list[str]:
  """Returns what there is to know first of one program under one or several policies.

  Args:
    explanations: one for each policy.
    in_config: whether the policy is one of a config, for the line that says how to change it.
  """
  first = [line for one in explanations[:_MOST_POLICIES] for line in _figures(one)]
  if len(explanations) > _MOST_POLICIES:
    first.append(f"{len(explanations) - _MOST_POLICIES} more: see the table of totals")
  if len(explanations) == 1:
    first += _costs(explanations[0])
  mixed = [one for one in explanations if not all_float32(one)]
  last = [*_merged(mixed, _fragile), *_merged(explanations, _unknown), _change(explanations, in_config)]
  if len(mixed) > 1:
    first.append(f"Shares below are under {', '.join(one.policy.label for one in mixed)}.")
  reasons = [(title, found) for title, of in _REASONS.items() if (found := _shared(mixed, of))]
  room = max(ANSWER_LINES - sum(map(height, [*first, *last])), _LEAST_ROOM)
  for later, (title, found) in zip(reversed(range(len(reasons))), reasons, strict=True):
    if room > 1:
      shown = _reason_lines(title, found, max(1, min(room - 1 - 2 * later, _FEW if later else room)))
      first += shown
      room -= sum(map(height, shown))
  return answer_lines(first, last=last)


def _figures(one: ExplainedProgram) -> list[str]:
  """Returns the shares of the matrix FLOPs by dtype, the FP8 recipe in force, and the note."""
  flops = one.matrix_flops()
  total = sum(flops.values())
  full = sum(map(is_full, one.rows))
  shares = [f"{percent(flops[dtype] / total)} in {dtype}" for dtype in sorted(flops, key=lambda d: -flops[d])]
  precision = f" ({one.policy.matmul_precision})" if one.policy.matmul_precision else ""
  products = f"{with_prefix(total, 'FLOP')} of matrix products"
  said = ", ".join([products, *shares]) + precision if total else "no matrix products"
  lead = f"policy {named(one.policy)}: {said}; {full} of {len(one.rows)} operations in float32"
  return [lead, *([f"fp8: {one.fp8}"] if one.fp8 else []), *([one.note] if one.note else [])]


def _costs(one: ExplainedProgram) -> list[str]:
  casts = sum(row.casts for row in one.rows)
  count = len(one.islands)
  said = []
  if casts:
    written = bytes_text(sum(row.cast_bytes for row in one.rows))
    said.append(f"1 cast writes {written}" if casts == 1 else f"{casts} casts write {written}")
  if count:
    kept = bytes_text(sum(island.kept_bytes for island in one.islands))
    islands = "1 float32 island keeps" if count == 1 else f"{count} float32 islands keep"
    said.append(f"{islands} {kept} for the backward pass, which computes the rest again")
  return ["; ".join(said)] if said else ["nothing is cast"] * all_float32(one)


class _Shared(NamedTuple):
  """A reason with its share under each policy that is not float32 throughout."""

  alike: Alike
  shares: list[float]


_REASONS = {
  "Kernels in float32, by share of the FLOPs, and what to write": float32_kernels,
  "float32 products, by share of the FLOPs": float32_products,
  "Products not in FP8, by share of the FLOPs": not_fp8,
  "float32 operations, by share of the bytes of all results": float32_others,
}


def _shared(
  explanations: Sequence[ExplainedProgram], reasons: Callable[[ExplainedProgram], list[Alike]]
) -> list[_Shared]:
  """Returns reasons, the largest first; those that several policies have once."""
  found: dict[tuple[tuple[str, ...], str], _Shared] = {}
  for i, one in enumerate(explanations):
    for alike in reasons(one):
      shared = found.setdefault((alike.modules, alike.why), _Shared(alike, [0.0] * len(explanations)))
      shared.shares[i] += alike.share
  return sorted(found.values(), key=lambda shared: -max(shared.shares))


def _reason_lines(title: str, found: Sequence[_Shared], most: int) -> list[str]:
  """Returns a title and at most so many lines: the largest reasons, and the sum of the others."""
  large = min(sum(max(shared.shares) >= _LEAST for shared in found), most)
  shown = max(1, min(large, most - (len(found) > large)))  # with a line for the others where there is room
  width = _MOST_WHY if _REASONS[title] is float32_kernels else _WHY
  lines = [_reason_line(shared, width) for shared in found[:shown]]
  rest = found[shown:]
  if rest and shown < most:
    sums = [sum(shares) for shares in zip(*(shared.shares for shared in rest), strict=True)]
    lines.append(f"{_shares(sums)}{len(rest)} other reason{'s' * (len(rest) > 1)}")
  return [f"{title}:", *lines]


def _reason_line(shared: _Shared, width: int) -> str:
  """Returns a reason of at most so many columns with its share, the operations, and where they are."""
  alike, shares = shared
  lead, why = _shares(shares), _cut(alike.why, width)
  room = max(TEXT_WIDTH - len(f"{lead} in : {why}."), 2 * _LEAST_NAME)
  most = room - min(room // 3, len(", ".join(alike.names)))
  for width in range(most, _LEAST_NAME, -1):
    modules = _listed(alike.modules, width, tail=True)
    names = _listed(alike.names, room - len(modules))
    if len(names + modules) <= room:
      break
  where = "outside modules" if modules == ROOT else f"in {modules}"
  return f"{lead}{names} {where}: {why}"


def _fragile(one: ExplainedProgram) -> str:
  if not one.fragile:
    return "Fragile in half precision: nothing was found."
  first, count = one.fragile[0], len(one.fragile)
  operations = "1 operation" if count == 1 else f"{count} operations"
  where = f"{first.primitive} at {first.line}" + (f" in {_tail(first.path, _PATH)}" if first.path else "")
  return f"Fragile in half precision: {operations}; the first is {where}, {first.why}"


def _unknown(one: ExplainedProgram) -> str:
  if not one.unknown:
    return ""
  names = counted(one.unknown)
  return f"Unknown primitives, left in the dtypes of the program: {names}; OpLists puts them on a list"


def _change(explanations: Sequence[ExplainedProgram], in_config: bool) -> str:
  """Returns how to change what is half precision, with a module of this program as the example."""
  one = explanations[-1]
  base = "float32" if one.policy.compute_dtype.itemsize < 4 else "bfloat16"
  module = one.fragile[0].path if one.fragile else ""
  if not module:
    products = [row for row in one.rows if row.flops and row.path]
    products = [row for row in products if row.after != base] or products
    module = max(products, key=lambda row: row.flops).path if products else ""
  if not module:
    return (
      "Change it: full_precision(f), half_precision(f), or overrides= for a part that jax.named_scope names"
    )
  alike = [path for path in paths_of(one) if layer_pattern(path) == layer_pattern(module)]
  [name] = merged_names([alike], paths_of(one))
  parts = name.replace("*", ".*").split("/")
  while len(parts) > 1 and len("/".join(parts)) > _PATH:  # a pattern may begin at any part of a path
    del parts[0]
  pattern = "/".join(parts)
  how = f'policy.overrides: {{"{pattern}": {base}}}' if in_config else f'overrides={{"{pattern}": "{base}"}}'
  return f"Change it: {how}, or full_precision(f), half_precision(f) for a function"


def _merged(explanations: Sequence[ExplainedProgram], line: Callable[[ExplainedProgram], str]) -> list[str]:
  """Returns a line about each explanation; equal ones once, others with their policies."""
  said = [(one.policy.label, line(one)) for one in explanations]
  groups = grouped((pair for pair in said if pair[1]), lambda pair: pair[1])
  if len(groups) == 1 and len(groups[0]) == len(said):
    return [groups[0][0][1]]
  return [f"{', '.join(label for label, _ in group)}: {group[0][1]}" for group in groups]


def _listed(names: Sequence[str], width: int, *, tail: bool = False) -> str:
  """Returns as many names as there is room for, at least one, and the number of the others.

  Where there is room for a part of one, it is its end or its beginning: the end of a path tells more.
  """
  for shown in range(len(names), 0, -1):
    rest = f" and {len(names) - shown} more" if shown < len(names) else ""
    if len(text := ", ".join(names[:shown]) + rest) <= width:
      return text
  room = max(width - len(rest), _LEAST_NAME)
  return (_tail if tail else _cut)(names[0], room) + rest


def _tail(path: str, width: int) -> str:
  """Returns the end of a path, from the beginning of a part of it on if that is not all of it."""
  if len(path) <= width:
    return path
  end = path[3 - width :]
  return f"...{end[max(end.find('/'), 0) :]}"


def _shares(shares: Sequence[float]) -> str:
  shown = ("-" if not share else f"{share:.0%}" if share >= _LEAST else "<1%" for share in shares)
  return "  " + "".join(f"{share:>4}  " for share in shown)


def _cut(text: str, width: int) -> str:
  return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."
