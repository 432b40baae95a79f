"""A traced program as a flat list of operations on values, each with its module and line.

Calls are inlined: a `jit`, a `custom_vjp` or a rematerialised region becomes its operations. A loop or a
conditional stays one operation, which holds the graphs of its bodies. Each array has its bytes on one device,
and knows which weight it is a form of.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
  call_layout,
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
from mpjax.planner._arguments import Argument, argument_bytes
from mpjax.planner._array_bytes import itemsize, tiled_bytes
from mpjax.planner._program import Buffer

_SLICES = (jax.lax.slice_p, jax.lax.dynamic_slice_p, jax.lax.squeeze_p)


class Sizes:
  """Bytes of arrays on one device, from the layout of a step's arguments.

  Args:
    arguments: the leaves of the step's arguments.
    kind: kind of the platform; a TPU pads.

  Attributes:
    weights: one device's share, with padding, of an array with a weight's shape: also transposed, or one
      layer of a stack. Weights of one shape may lie on the mesh in several ways: all of them together have
      the right bytes.
  """

  def __init__(self, arguments: Sequence[Argument] = (), kind: str = ""):
    batch = [a for a in arguments if a.part == "batch"]
    whole = sum(a.whole for a in batch)
    self._share = sum(a.nbytes for a in batch) / whole if whole else 1.0  # of what depends on the batch
    self._kind = kind
    shares: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
    for a in arguments:
      if a.part == "master weights" and len(a.shape) > 1:
        for shape in like_weight(a.shape):
          shares[shape].append(argument_bytes(a, kind) / max(1, a.whole))
    self.weights = {shape: statistics.mean(several) for shape, several in shares.items()}

  def of(self, shape: tuple[int, ...], dtype: Any, *, local: bool = False) -> int:
    """Returns the bytes of an array on one device; a `local` one has the shape on a device already."""
    nbytes = math.ceil(math.prod(shape) * itemsize(dtype))
    if not local and shape in self.weights:
      return int(nbytes * self.weights[shape])
    padded = tiled_bytes(shape, dtype) if self._kind == "tpu" and shape else nbytes
    return padded if local else int(padded * self._share)


def like_weight(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  """Returns the shapes that stand for a weight or its gradient: transposed, and one layer of a stack."""
  found = [shape, shape[::-1]]
  return [*found, shape[1:], shape[:0:-1]] if len(shape) > 2 else found


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
    region: number of its rematerialised region, 0 without one.
    equation: the traced equation.
    local: whether it is inside a `shard_map`, with the shapes of one device.
    divided: inside a `shard_map`, number of devices that divide those shapes further (a `tensor` axis).
    bodies: graphs of a loop's or conditional's bodies.
    times: how often the bodies run (a `while` counts once).
    group: for a collective, the number of devices that exchange with each other; 1 otherwise.
  """

  name: str
  operands: list[Buffer]
  results: list[Buffer]
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

  arguments: list[Buffer]
  results: list[Buffer]
  operations: list[GraphOperation]
  sizes: Sizes = dataclasses.field(default_factory=Sizes)

  def every_operation(
    self,
    times: int = 1,
    *,
    worth: Callable[[GraphOperation], float] = lambda operation: operation.flops,
    choose: Callable[..., Graph] = max,
  ) -> Iterator[tuple[GraphOperation, int]]:
    """Yields all operations, also those in loops, with the number of times that each runs.

    Args:
      times: how often the graph runs.
      worth: the measure of an operation by which a branch of a conditional is chosen.
      choose: `max` for the branch with the most of it, `min` for the least.
    """
    for operation in self.operations:
      yield operation, times
      bodies = operation.bodies
      if call_kind(operation.equation) is CallKind.COND:
        measure = lambda body: sum(worth(o) * n for o, n in body.every_operation(worth=worth, choose=choose))
        bodies = [choose(bodies, key=measure)]
      for body in bodies:
        yield from body.every_operation(times * operation.times, worth=worth, choose=choose)


def make_graph(closed: AnyJaxpr, arguments: Sequence[Argument] = (), kind: str = "") -> Graph:
  """Returns the graph of a closed jaxpr.

  Args:
    closed: the jaxpr.
    arguments: its arguments, with their parts of memory.
    kind: kind of the platform whose layout arrays have.
  """
  jaxpr = open_jaxpr(closed)
  given = [
    Buffer((), None, weight=i if a.part == "master weights" else None) for i, a in enumerate(arguments)
  ]
  graph = _Builder(Sizes(arguments, kind)).graph(jaxpr, _Context(OTHER, "", "", 0), given)
  if kind == "gpu":
    # Kernels read the host's memory themselves, and XLA's memory scheduler copies each result when it is
    # there, so that few are on the device at once. The latency-hiding scheduler may hold more.
    for copy, _ in graph.every_operation():
      for value in (*copy.operands, *copy.results) if copy.crosses else ():
        viewed(value).nbytes = 0
  return graph


def viewed(value: Buffer) -> Buffer:
  """Returns the value that a value is a view of."""
  while value.maker is not None and has(value.maker.equation, Trait.ALIAS):
    value = value.maker.operands[0]
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
  def __init__(self, sizes: Sizes) -> None:
    self._regions = 0
    self._sizes = sizes

  def graph(self, jaxpr: Jaxpr, context: _Context, given: Sequence[Buffer | None]) -> Graph:
    """Returns the graph of a jaxpr, whose arguments are the values `given`, or slices of them."""
    environment = {variable: self._value(variable.aval) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    arguments = [environment[variable] for variable in jaxpr.invars]
    for i, argument in enumerate(arguments):
      argument.argument = i
    for argument, outer in zip(arguments, given, strict=False):
      argument.weight = outer.weight if outer is not None else None
    operations: list[GraphOperation] = []
    self._run(jaxpr, environment, context, operations)
    results = [environment[v] for v in variables_of(jaxpr.outvars)]
    return Graph(arguments, results, _needed(operations, results), self._sizes)

  def _run(
    self, jaxpr: Jaxpr, environment: dict[Var, Buffer], context: _Context, out: list[GraphOperation]
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
      inner: dict[Var, Buffer] = {}
      opened = open_jaxpr(body)
      for variable in opened.constvars:
        inner[variable] = self._value(variable.aval)
      # The first operand of a choice by platform is the choice.
      operands = equation.invars[len(equation.invars) - len(opened.invars) :]
      for variable, atom in zip(opened.invars, operands, strict=True):
        inner[variable] = environment[atom] if is_variable(atom) else self._value(variable.aval)
      self._run(opened, inner, here, out)
      for variable, atom in zip(equation.outvars, opened.outvars, strict=True):
        environment[variable] = inner[atom] if is_variable(atom) else self._value(variable.aval)

  def _operation(self, equation: JaxprEqn, environment: dict[Var, Buffer], here: _Context) -> GraphOperation:
    kind = call_kind(equation)
    operands = [environment[v] for v in variables_of(equation.invars)]
    if "originals" in equation.params and not has(equation, Trait.PRODUCT):
      operands[1:] = operands[:1]  # the other one is there for a gradient alone
    results = []
    for variable in equation.outvars:
      environment[variable] = self._value(variable.aval, bool(here.axes))
      results.append(environment[variable])
    if operands and (has(equation, Trait.ALIAS | Trait.CAST) or equation.primitive in _SLICES):
      for value in results:
        value.weight = operands[0].weight
    bodies = []
    if kind is not None and kind.is_control_flow:
      for inner, places, _ in call_layout(equation).bodies:
        atoms = [equation.invars[k] for k in places]
        given = [environment[atom] if is_variable(atom) else None for atom in atoms]
        bodies.append(self.graph(open_jaxpr(inner), here, given))
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

  def _value(self, aval: AbstractValue, local: bool = False) -> Buffer:
    on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(np.float32))
    nbytes = self._sizes.of(shape, dtype, local=local)
    return Buffer(shape, dtype, 0 if on_host else nbytes, local=local, on_host=on_host, whole=nbytes)


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


def _needed(operations: list[GraphOperation], results: list[Buffer]) -> list[GraphOperation]:
  """Returns the operations that a result depends on, or that have an effect."""
  live = set(results)
  kept = []
  for operation in reversed(operations):
    if operation.equation.effects or not live.isdisjoint(operation.results):
      kept.append(operation)
      live.update(operation.operands)
  return kept[::-1]
