"""`explain`: what would run where under autocast, and why, as data and as a table."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax import _compat
from mpjax.casting._autocast import Traced, make_rules
from mpjax.casting._decide import NOT_FP8, Mode, Node, Plan
from mpjax.casting._higher_order import LOOPS
from mpjax.casting._islands import Island, read_dtype, schedule
from mpjax.casting._kinds import castable
from mpjax.casting._op_lists import OpLists
from mpjax.jaxpr import UNKNOWN, CallKind, call_kind, facts, flops
from mpjax.policy import Policy, get_policy


@dataclasses.dataclass(frozen=True)
class Row:
  """One operation of a program.

  Attributes:
    path: module path, such as `GPT/h0/attn`.
    primitive: name of the JAX primitive.
    list: allow, deny, infer or opaque.
    before: dtype of its result in the user's program.
    after: dtype that it runs in under autocast.
    flops: of a matrix product or convolution, all repetitions; 0 for others.
    bytes: of its results under autocast, all repetitions.
    casts: casts that autocast inserts before it.
    cast_bytes: what those casts write.
    island: number of the float32 island that it is part of, or `None`.
    why: the reason for the dtype.
    times: how often it runs (the length of the scans round it; a while loop counts once).
  """

  path: str
  primitive: str
  list: str
  before: str
  after: str
  flops: int
  bytes: int
  casts: int
  cast_bytes: int
  island: int | None
  why: str
  times: int


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What autocast does to a program: `rows` as data, `str()` as a table by module.

  Attributes:
    policy: the policy.
    rows: one for each operation, in the order of the program.
    unknown: names of the primitives that mpjax does not know and therefore leaves as they are: put them on
      a list with `OpLists.default().replace(infer=...)`.
  """

  policy: Policy
  rows: tuple[Row, ...]
  unknown: tuple[str, ...] = ()

  def matrix_flops(self) -> dict[str, int]:
    """Floating-point operations of matrix products and convolutions, by dtype."""
    total: dict[str, int] = {}
    for row in self.rows:
      if row.flops:
        total[row.after] = total.get(row.after, 0) + row.flops
    return total

  def __str__(self) -> str:
    parts = (self._summary(), self._modules(), self._not_fp8(), self._full(), self._unknown())
    return "\n\n".join(filter(None, parts))

  def _summary(self) -> str:
    flops = self.matrix_flops()
    whole = sum(flops.values()) or 1
    parts = [
      f"{dtype} {_count(n)} ({n / whole:.0%})" for dtype, n in sorted(flops.items(), key=lambda x: -x[1])
    ]
    islands = len({row.island for row in self.rows if row.island is not None})
    casts = sum(row.casts for row in self.rows)
    return (
      f"policy {self.policy.label}: {len(self.rows)} operations, {casts} casts "
      f"({_count(sum(row.cast_bytes for row in self.rows))}B), {islands} float32 islands; "
      f"matrix FLOPs: {', '.join(parts) or 'none'}"
    )

  def _modules(self) -> str:
    head = ("module", "allow", "deny", "infer", "opaque", "casts", "cast bytes", "FLOPs", "of it float32")
    lines = []
    for path, rows in _by_module(self.rows):
      count = lambda name, rows=rows: str(sum(row.list == name for row in rows) or "")
      flops = sum(row.flops for row in rows)
      full = sum(row.flops for row in rows if row.after == "float32")
      casts = sum(row.casts for row in rows)
      cells = [path or "(no module)", *map(count, ("allow", "deny", "infer", "opaque"))]
      cells += [str(casts), _count(sum(row.cast_bytes for row in rows))] if casts else ["", ""]
      lines.append((*cells, _count(flops) if flops else "", f"{full / flops:.0%}" if full else ""))
    return _table(head, lines)

  def _full(self) -> str:
    return _reasons("in float32", (row for row in self.rows if row.after == row.before == "float32"))

  def _unknown(self) -> str:
    if not self.unknown:
      return ""
    return f"unknown primitives, left in the dtypes of the program: {', '.join(self.unknown)}"

  def _not_fp8(self) -> str:
    return _reasons("not in FP8", (row for row in self.rows if row.flops), NOT_FP8)


def explain(
  fun: Callable[..., Any],
  policy: Any = "auto",
  *,
  ops: OpLists | None = None,
  overrides: Mapping[str, Any] | None = None,
) -> Callable[..., Explanation]:
  """What would run where, were `fun` under `mpjax.autocast` with these arguments; nothing is computed.

  Args:
    fun: any function that `mpjax.autocast` takes.
    policy: whatever `mpjax.get_policy` takes.
    ops: the lists, if not the default ones.
    overrides: policies by regex on the module path.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns an `Explanation`: `.rows`
    is the data, `str()` a table by module with the reason for all that is in float32.

  Raises:
    ValueError: for an override that matches no module path.
  """

  @functools.wraps(fun)
  def explained(*args: Any, **kwargs: Any) -> Explanation:
    resolved = get_policy(policy)
    rules = dataclasses.replace(make_rules(resolved, ops, overrides), enter_all=True)
    plan = Traced(fun, args, kwargs).plan(rules, resolved)
    rules.check_all_matched()
    unknown = {
      node.equation.primitive.name
      for node in plan.all_nodes()
      if node.listed == "opaque" and facts(node.equation) is UNKNOWN
    }
    return Explanation(resolved, tuple(_rows(plan, 1, _Numbers())), tuple(sorted(unknown)))

  return explained


def _reasons(title: str, rows: Iterable[Row], prefix: str = "") -> str:
  """Why something runs in its dtype, for reasons that start so: by module and reason."""
  reasons: dict[tuple[str, str], list[str]] = {}
  for row in rows:
    if row.why.startswith(prefix):
      reasons.setdefault((row.path or "(no module)", row.why.removeprefix(prefix)), []).append(row.primitive)
  lines = []
  for (path, why), names in reasons.items():
    counted = [f"{n} x{names.count(n)}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    lines.append((path, ", ".join(counted), why))
  return _table((title, "operations", "because"), lines) if lines else ""


class _Numbers:
  """Numbers for islands, one count for a whole program."""

  def __init__(self) -> None:
    self.last = 0

  def next(self) -> int:
    self.last += 1
    return self.last


def _rows(plan: Plan, times: int, numbers: _Numbers) -> Iterator[Row]:
  island_of: dict[int, int] = {}
  for unit in schedule(plan):
    if isinstance(unit, Island):
      number = numbers.next()
      island_of |= {id(node): number for node in unit.nodes}
  made: set[tuple[Any, Any]] = set()
  for node in plan.nodes:
    if node.mode is Mode.ENTER:
      length = node.equation.params["length"] if call_kind(node.equation) is CallKind.SCAN else 1
      for inner in node.call.plans:
        yield from _rows(inner, times * length, numbers)
      continue
    island = island_of.get(id(node))
    casts = list(_casts(plan, node, made, island))
    results = [v.aval for v in node.equation.outvars if hasattr(v.aval, "shape")]
    runs_in = _runs_in(plan, node)
    yield Row(
      path=node.path,
      primitive=_name(node.equation),
      list=node.listed,
      before=str(results[0].dtype) if results else "",
      after=runs_in,
      flops=flops(node.equation) * times,
      bytes=times
      * sum(
        _bytes(aval, held.dtype if castable(aval) else aval.dtype)
        for aval, held in zip(results, node.outs, strict=False)
      ),
      casts=len(casts),
      cast_bytes=times * sum(_bytes(aval, dtype) for aval, dtype in casts),
      island=island,
      why=node.why,
      times=times,
    )


def _casts(plan: Plan, node: Node, made: set[Any], island: int | None) -> Iterator[tuple[Any, Any]]:
  """(aval, dtype) of the casts that an equation is the first to need; inside an island none is stored."""
  for atom in node.equation.invars:
    if not _compat.is_variable(atom) or not castable(atom.aval):
      continue
    dtype = np.dtype(read_dtype(plan, node, atom))
    if dtype != plan.held[atom].dtype and (atom, dtype) not in made and island is None:
      made.add((atom, dtype))
      yield atom.aval, dtype


def _runs_in(plan: Plan, node: Node) -> str:
  if node.fp8 is not None:
    return node.fp8.recipe.forward_dtype
  if node.mode is Mode.HALF:
    return np.dtype(node.half).name
  avals = [v.aval for v in node.equation.outvars if hasattr(v.aval, "dtype")]
  if node.mode is Mode.EACH and node.outs:
    return str(node.outs[0].dtype)
  return str(avals[0].dtype) if avals else ""


def _name(equation: Any) -> str:
  name = equation.primitive.name
  inner = equation.params.get("name") if call_kind(equation) not in LOOPS else None
  return f"{name}:{inner}" if isinstance(inner, str) else name


def _bytes(aval: Any, dtype: Any) -> int:
  return math.prod(aval.shape) * (np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else 4)


def _by_module(rows: tuple[Row, ...]) -> list[tuple[str, list[Row]]]:
  groups: dict[str, list[Row]] = {}
  for row in rows:
    groups.setdefault(row.path, []).append(row)
  return list(groups.items())


def _count(n: float) -> str:
  for unit in ("", "k", "M", "G", "T"):
    if n < 1000 or unit == "T":
      return f"{n:.3g}{unit}" if unit else str(int(n))
    n /= 1000
  return ""


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
  widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
  words = [all(not line[i][:1].isdigit() for line in lines) for i in range(len(head))]
  align = lambda cell, i: cell.ljust(widths[i]) if words[i] or i == 0 else cell.rjust(widths[i])
  return "\n".join(
    "  ".join(align(cell, i) for i, cell in enumerate(line)).rstrip() for line in (head, *lines)
  )
