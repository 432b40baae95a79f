"""Observes values inside a function: chooses and names them, and attaches a probe to each.

The observed values are those that leave a module, and the operands and results of matrix products, in every
body with a product. Values inside a custom derivative rule, a `while_loop` or a `shard_map` are left out. The
choice depends only on the function, so that a policy's run and float32's can be compared value by value.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpjax._types import Array, Atom, Fp8State, JaxprEqn, PyTree, Var
from mpjax.casting import (
  CastPlan,
  Mode,
  Node,
  Tap,
  Traced,
  castable,
  is_float,
  plan_of,
  size,
)
from mpjax.jaxpr import (
  CallKind,
  Trait,
  at_region_edge,
  call_kind,
  dtype_of,
  has,
  in_region,
  is_variable,
  operation_name,
  shape_of,
  source_line,
  times_run,
  variables_of,
  without_marks,
)
from mpjax.numerics._fragile import fragile_equations
from mpjax.policy import Policy

# Steps of a longer loop, or of time, are observed together.
_LONGEST = 128


@dataclasses.dataclass(frozen=True)
class Point:
  """An observed value.

  Attributes:
    module: module path of the equation that computes it.
    name: the equation's primitive or function, with a number if its module has several.
    line: line of the user's program, such as `model.py:31`.
    dtype: its dtype.
    gradient_dtype: dtype in which its gradient is read; for a product, the dtype of the operands.
    shape: its shape in one step of the loops around it.
    steps: lengths of the loops around it whose steps are kept apart, outermost first.
    repeats: lengths of the loops inside these, whose steps are observed together.
    fragile: `difference` for a difference of matrix products, `angle` for an angle that a product computes;
      else empty.
  """

  module: str
  name: str
  line: str
  dtype: str
  gradient_dtype: str
  shape: tuple[int, ...]
  steps: tuple[int, ...]
  repeats: tuple[int, ...] = ()
  fragile: str = ""


def watched(
  fun: Callable[..., Any],
  policy: Policy | None,
  probes: Sequence[PyTree],
  look: Callable[[Array, Any], Array],
  *,
  recompute: str = "islands",
  fp8_state: Fp8State | None = None,
) -> Callable[..., Any]:
  """Returns `mpjax.autocast(fun, policy)`, or `fun` as written, with `look` called at each of its points.

  Args:
    fun: the function.
    policy: whatever autocast takes; `None` for the function as written.
    probes: an array (or a tree of arrays) for each point, [*point.steps, *point.repeats, ...].
    look: (value, probe) -> value; it gets the probe of the current step of the loops around the value.
    recompute: as for `autocast`.
    fp8_state: as for `autocast`.

  Returns:
    A function with `fun`'s signature and the same output dtypes as without `look`.
  """

  def run(*args: Any, **kwargs: Any) -> Any:
    traced = plan_of(fun, args, kwargs, policy, recompute=recompute)
    points = points_of(traced)
    if len(points) != len(probes):
      raise ValueError(f"{len(probes)} probes: expected one for each of the {len(points)} points")
    numbers = {place: number for number, place in enumerate(points)}
    return traced.execute(Tap(numbers, probes, look), fp8_state)

  return run


def points_of(traced: Traced) -> dict[tuple[Node, int], Point]:
  """Returns the results that `watched` observes, by decision and position, in program order."""
  kinds = fragile_equations(traced.closed, traced.rules)
  return dict(_walk(traced.plan, (), (), traced, kinds, collections.Counter()))


def _walk(
  plan: CastPlan,
  steps: tuple[int, ...],
  repeats: tuple[int, ...],
  traced: Traced,
  kinds: Mapping[JaxprEqn, str],
  seen: collections.Counter[tuple[str, str]],
) -> Iterator[tuple[tuple[Node, int], Point]]:
  chosen = _chosen(plan, kinds)
  for node in plan.nodes:
    if _is_entered(node):
      for inner in node.call.plans if node.call else ():
        yield from _walk(inner, *_loops_inside(node, steps, repeats, traced), traced, kinds, seen)
      continue
    for i, variable in enumerate(node.equation.outvars):
      if variable in chosen:
        yield (node, i), _point(node, i, steps, repeats, chosen[variable], seen)


def _loops_inside(
  node: Node, steps: tuple[int, ...], repeats: tuple[int, ...], traced: Traced
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the loops around a body whose steps are kept apart, and those inside them."""
  if call_kind(node.equation) is not CallKind.SCAN:
    return steps, repeats
  length = times_run(node.equation)
  # If its steps are not layers, each with its own weights, they are steps of time.
  layers = traced.steps_are_layers(node.equation)
  if repeats or not layers or math.prod((*steps, length)) > _LONGEST:
    return steps, (*repeats, length)
  return (*steps, length), repeats


def _point(
  node: Node,
  i: int,
  steps: tuple[int, ...],
  repeats: tuple[int, ...],
  fragile: str,
  seen: collections.Counter[tuple[str, str]],
) -> Point:
  equation = node.equation
  variable = equation.outvars[i]
  operation = operation_name(equation)
  seen[node.path, operation] += 1
  count = seen[node.path, operation]
  dtype = node.outs[i].dtype if castable(variable.aval) else dtype_of(variable)
  return Point(
    without_marks(node.path),
    operation if count == 1 else f"{operation} {count}",
    source_line(equation),
    dtype.name,
    node.half.name if node.mode is Mode.HALF and node.half is not None else dtype.name,
    shape_of(variable),
    steps,
    repeats,
    fragile,
  )


def _is_entered(node: Node) -> bool:
  """Returns whether the values in a node's body are observed one by one."""
  kind = call_kind(node.equation)
  looked_at = kind is not None and kind.is_plain and kind not in (CallKind.WHILE, CallKind.SHARD_MAP)
  return node.call is not None and looked_at and node.has_product()


def _chosen(plan: CastPlan, kinds: Mapping[JaxprEqn, str]) -> dict[Var, str]:
  """Returns the observed variables of one body, each with its kind of fragility."""
  maker = {v: node for node in plan.nodes for v in node.equation.outvars}

  def origin(atom: Var) -> Var | None:
    """Returns the variable that a view shows, within the same module."""
    node = maker.get(atom)
    while node is not None and has(node.equation, Trait.SAME_WEIGHT) and node.call is None:
      source = node.equation.invars[0]
      if not is_variable(source) or source not in maker:
        return None
      before = maker[source]
      if before.path != node.path:
        break
      atom, node = source, before
    return atom

  wanted: list[Atom] = [*variables_of(plan.jaxpr.outvars)]
  for node in plan.nodes:
    product = node.listed == "allow" or node.has_product()
    if product and not _is_entered(node):
      wanted += node.equation.outvars
      wanted += node.equation.invars
    else:
      wanted += [
        a for a in node.equation.invars if is_variable(a) and a in maker and _leaves(maker[a].path, node.path)
      ]
  at = {"difference": lambda e: e.outvars[0], "angle": lambda e: e.invars[0]}
  found = [(node.equation, kinds[node.equation]) for node in plan.nodes if kinds.get(node.equation) in at]
  fragile = {origin(atom): kind for e, kind in found for atom in variables_of([at[kind](e)])}
  origins = {*map(origin, variables_of(wanted)), *fragile}
  looked_at = {v for v in origins if v in maker and is_float(v.aval) and size(v) > 1}
  # In another dtype a region has other equations; only values that enter one in half precision are observed.
  enters = lambda v: at_region_edge(maker[v].path) and dtype_of(v).itemsize < 4
  return {v: fragile.get(v, "") for v in looked_at if not in_region(maker[v].path) or enters(v)}


def _leaves(source: str, target: str) -> bool:
  """Returns whether a value that one module makes and another reads has left the first."""
  return target != source and not target.startswith(f"{source}/") and bool(source)
