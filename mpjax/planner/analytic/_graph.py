"""A traced program as a flat list of operations on values, each with its module and line.

Calls are inlined: a `jit`, a `custom_vjp` or a rematerialised region becomes its operations. A loop or a
conditional stays one operation, which holds the graphs of its bodies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue

from mpjax import _compat
from mpjax._types import AnyJaxpr, Jaxpr, JaxprEqn, Var
from mpjax.jaxpr import (
  BACKWARD,
  OTHER,
  CallKind,
  Trait,
  bodies_of,
  call_kind,
  default_branch,
  facts,
  flops,
  has,
  inside,
  is_recomputed,
  is_variable,
  module_path,
  open_jaxpr,
  phase_of,
  source_line,
  times_run,
  variables_of,
)
from mpjax.planner._array_bytes import itemsize


@dataclasses.dataclass(eq=False, slots=True)
class GraphValue:
  """An array of the program.

  Attributes:
    shape, dtype: as traced, for all devices together.
    maker: the operation that computes it; `None` for an argument or a constant.
    argument: its position among the flat arguments, or `None`.
    local: whether the shape is already one device's share (inside a `shard_map`).
    on_host: whether it is in the host's memory.
  """

  shape: tuple[int, ...]
  dtype: Any
  maker: GraphOperation | None = None
  argument: int | None = None
  local: bool = False
  on_host: bool = False

  @property
  def nbytes(self) -> int:
    """Returns the bytes without padding."""
    return math.ceil(math.prod(self.shape) * itemsize(self.dtype))


@dataclasses.dataclass(eq=False, slots=True)
class GraphOperation:
  """One equation.

  Attributes:
    name: name of the primitive.
    operands, results: values; literals are left out.
    phase: FORWARD in the forward pass of a derivative, BACKWARD in the backward pass, else OTHER.
    path: module path, such as `GPT/blocks/0/up`.
    source: file and line of the user's program, such as `model.py:31`.
    flops: FLOPs of one run of a matrix product or convolution.
    region: number of its rematerialised region, 0 without one. The compiler does not merge operations of
      different regions, unless it ignores regions.
    equation: the traced equation.
    local: whether it is inside a `shard_map`, with the shapes of one device.
    divided: inside a `shard_map`, number of devices that divide those shapes further (a `tensor` axis).
    bodies: graphs of a loop's or conditional's bodies.
    times: how often the bodies run (a `while` counts once).
    group: for a collective, the number of devices that exchange with each other; 1 otherwise.
  """

  name: str
  operands: list[GraphValue]
  results: list[GraphValue]
  phase: str
  path: str
  source: str
  flops: int
  region: int
  equation: JaxprEqn
  local: bool
  bodies: list[Graph]
  times: int
  group: int = 1
  divided: int = 1

  def flops_on(self, devices: int) -> float:
    """Returns the FLOPs of one run on each of the devices of a step."""
    return self.flops / (self.divided if self.local else devices)

  @property
  def crosses(self) -> bool:
    """Returns whether it copies an array between a device and the host's memory."""
    moves = self.equation.primitive is jax.lax.device_put_p
    return moves and any(a.on_host != b.on_host for a, b in zip(self.operands, self.results, strict=False))


@dataclasses.dataclass(eq=False, slots=True)
class Graph:
  """Operations in program order, without operations whose results nothing reads."""

  arguments: list[GraphValue]
  results: list[GraphValue]
  operations: list[GraphOperation]
  literal_bytes: int = 0  # bytes of results that are constants

  def every_operation(self, times: int = 1, *, least: bool = False) -> Iterator[tuple[GraphOperation, int]]:
    """Yields all operations, also those in loops, with the number of times that each runs.

    A conditional yields the branch with the most FLOPs, or with the `least`.
    """
    for operation in self.operations:
      yield operation, times
      bodies = operation.bodies
      if call_kind(operation.equation) is CallKind.COND:
        bodies = [(min if least else max)(bodies, key=lambda body: body.flops(least=least))]
      for body in bodies:
        yield from body.every_operation(times * operation.times, least=least)

  def flops(self, *, least: bool = False) -> int:
    """Returns the FLOPs of all products."""
    return sum(operation.flops * times for operation, times in self.every_operation(least=least))


def make_graph(closed: AnyJaxpr) -> Graph:
  """Returns the graph of a closed jaxpr."""
  jaxpr = open_jaxpr(closed)
  return _Builder().graph(jaxpr, _Context(OTHER, "", "", 0))


def merged(graph: Graph, *, through_regions: bool) -> Graph:
  """Returns the graph with one operation in place of several that compute the same.

  Args:
    graph: graph of the program.
    through_regions: also merge what a rematerialised region recomputes with the first computation, as a
      compiler does that ignores barriers.
  """
  same: dict[int, GraphValue] = {}
  made: dict[Hashable, GraphOperation] = {}

  def now(value: GraphValue) -> GraphValue:
    return same.get(id(value), value)

  operations = []
  for operation in graph.operations:
    operands = [now(value) for value in operation.operands]
    if operation.equation.primitive is jax.lax.optimization_barrier_p and through_regions:
      same |= {id(result): operand for result, operand in zip(operation.results, operands, strict=True)}
      continue
    key = _key(operation, operands, 0 if through_regions else operation.region)
    twin = made.get(key) if key is not None else None
    if twin is not None:
      same |= {id(a): b for a, b in zip(operation.results, twin.results, strict=True)}
      continue
    if operands != operation.operands:
      operation = dataclasses.replace(operation, operands=operands)
      for value in operation.results:
        value.maker = operation
    if key is not None:
      made[key] = operation
    operations.append(operation)
  results = [now(value) for value in graph.results]
  return Graph(graph.arguments, results, _needed(operations, results), graph.literal_bytes)


def _key(operation: GraphOperation, operands: list[GraphValue], region: int) -> Hashable:
  """Returns a key, equal for operations that compute the same; `None` for one that must not be merged."""
  equation = operation.equation
  if operation.bodies or equation.effects or bodies_of(equation):
    return None
  given = iter(operands)
  atoms = [
    id(next(given)) if is_variable(atom) else (str(atom.val), str(atom.aval)) for atom in equation.invars
  ]
  parameters = tuple((name, _hashable(value)) for name, value in sorted(equation.params.items()))
  return operation.name, region, tuple(atoms), parameters


def _hashable(value: object) -> Hashable:
  try:
    hash(value)
  except TypeError:
    return str(value)
  return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
  phase: str
  path: str
  source: str
  region: int
  # Inside a `shard_map`: the number of devices on each axis of its mesh, and the axes left to the compiler.
  axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  left: frozenset[str] = frozenset()


class _Builder:
  def __init__(self) -> None:
    self._regions = 0

  def graph(self, jaxpr: Jaxpr, context: _Context) -> Graph:
    environment: dict[Var, GraphValue] = {}
    arguments = []
    for i, variable in enumerate(jaxpr.invars):
      environment[variable] = _value(variable.aval)
      environment[variable].argument = i
      arguments.append(environment[variable])
    for variable in jaxpr.constvars:
      environment[variable] = _value(variable.aval)
    operations: list[GraphOperation] = []
    self._run(jaxpr, environment, context, operations)
    results = [environment[v] for v in variables_of(jaxpr.outvars)]
    literals = [_value(v.aval).nbytes for v in jaxpr.outvars if not is_variable(v)]
    return Graph(arguments, results, _needed(operations, results), sum(literals))

  def _run(
    self, jaxpr: Jaxpr, environment: dict[Var, GraphValue], context: _Context, out: list[GraphOperation]
  ) -> None:
    for equation in jaxpr.eqns:
      here = _at(equation, context)
      if is_recomputed(equation):
        self._regions += 1
        here = dataclasses.replace(here, region=self._regions)
      if call_kind(equation) is CallKind.SHARD_MAP:
        axes = {**here.axes, **equation.params["mesh"].shape}
        left = (here.left if here.axes else axes.keys()) - {*_compat.manual_axes(equation)}
        here = dataclasses.replace(here, axes=axes, left=frozenset(left))
      body = _call(equation)
      if body is None:
        out.append(self._operation(equation, environment, here))
        continue
      inner: dict[Var, GraphValue] = {}
      opened = open_jaxpr(body)
      for variable in opened.constvars:
        inner[variable] = _value(variable.aval)
      # The first operand of a choice by platform is the choice.
      operands = equation.invars[len(equation.invars) - len(opened.invars) :]
      for variable, atom in zip(opened.invars, operands, strict=True):
        inner[variable] = environment[atom] if is_variable(atom) else _value(variable.aval)
      self._run(opened, inner, here, out)
      for variable, atom in zip(equation.outvars, opened.outvars, strict=True):
        environment[variable] = inner[atom] if is_variable(atom) else _value(variable.aval)

  def _operation(
    self, equation: JaxprEqn, environment: dict[Var, GraphValue], here: _Context
  ) -> GraphOperation:
    kind = call_kind(equation)
    operands = [environment[v] for v in variables_of(equation.invars)]
    if "originals" in equation.params and not has(equation, Trait.PRODUCT):
      operands[1:] = operands[:1]  # the other one is there for a gradient alone
    results = []
    for variable in equation.outvars:
      environment[variable] = _value(variable.aval)
      environment[variable].local = bool(here.axes)
      results.append(environment[variable])
    bodies = []
    if kind is not None and kind.is_control_flow:
      bodies = [self.graph(open_jaxpr(body), here) for body in bodies_of(equation)]
    times = times_run(equation)
    if not here.path or not here.source:
      # An operation that a transformation added does not have a name: it belongs to what it reads.
      makers = [value.maker for value in operands if value.maker is not None and value.maker.path]
      if makers:
        here = dataclasses.replace(
          here, path=here.path or makers[0].path, source=here.source or makers[0].source
        )
    operation = GraphOperation(
      equation.primitive.name,
      operands,
      results,
      here.phase,
      here.path,
      here.source,
      flops(equation),
      here.region,
      equation,
      bool(here.axes),
      bodies,
      times,
      _group(equation, here.axes) if facts(equation).collective else 1,
      math.prod(here.axes[axis] for axis in here.left),
    )
    for value in results:
      value.maker = operation
    return operation


def _value(aval: AbstractValue) -> GraphValue:
  on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
  shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(np.float32))
  return GraphValue(shape, dtype, on_host=on_host)


def _call(equation: JaxprEqn) -> AnyJaxpr | None:
  """Returns the jaxpr that an equation only calls, or `None`; for a choice by platform, the default."""
  branch = default_branch(equation)
  if branch is not None:
    return branch
  kind = call_kind(equation)
  if kind is None or kind.is_control_flow:
    return None
  bodies = bodies_of(equation)
  if len(bodies) != 1 or len(open_jaxpr(bodies[0]).invars) != len(equation.invars):
    return None
  return bodies[0] if len(open_jaxpr(bodies[0]).outvars) == len(equation.outvars) else None


def _group(equation: JaxprEqn, sizes: Mapping[str, int]) -> int:
  """Returns how many devices exchange in a collective over axes of these sizes."""
  if groups := equation.params.get("axis_index_groups"):
    return max(map(len, groups))
  axes = equation.params.get("axes", equation.params.get("axis_name", ()))
  return math.prod(sizes.get(axis, 1) for axis in (axes if isinstance(axes, tuple) else (axes,)))


def _at(equation: JaxprEqn, context: _Context) -> _Context:
  phase = phase_of(equation)
  if context.phase == BACKWARD or (phase == OTHER and context.phase):
    phase = context.phase
  path = inside(context.path, module_path(equation))
  return _Context(
    phase, path, source_line(equation) or context.source, context.region, context.axes, context.left
  )


def _needed(operations: list[GraphOperation], results: list[GraphValue]) -> list[GraphOperation]:
  """Returns the operations that a result depends on, or that have an effect."""
  live = {id(value) for value in results}
  kept = []
  for operation in reversed(operations):
    if operation.equation.effects or any(id(value) in live for value in operation.results):
      kept.append(operation)
      live |= {id(value) for value in operation.operands}
  return kept[::-1]
