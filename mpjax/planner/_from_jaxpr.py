"""A traced program as operations on buffers, each with its module and line, its products and collectives.

Calls are inlined: a `jit`, a `custom_vjp` or a rematerialised region becomes its operations. A loop or a
conditional stays one operation, which holds the programs of its bodies. Each array has its bytes on one
device, and knows which weight it is a form of.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jax.core import AbstractValue

from mpjax import _compat
from mpjax._types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Var
from mpjax.formats import narrow_bits
from mpjax.jaxpr import (
  BACKWARD,
  OTHER,
  CallKind,
  Trait,
  call_kind,
  call_layout,
  default_branch,
  dtype_of,
  facts,
  flops,
  has,
  inside,
  is_variable,
  module_path,
  open_jaxpr,
  phase_of,
  shape_of,
  source_line,
  times_run,
  variables_of,
)
from mpjax.planner._arguments import Argument, array_bytes
from mpjax.planner._products import product_of
from mpjax.planner._program import Buffer, Operation, Program, fused_kernel
from mpjax.planner._results import Collective
from mpjax.planner._targets import Target, get_target


def _like_weight(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  """Returns the shapes that stand for a weight or its gradient: transposed, and one layer of a stack."""
  found = [shape, shape[::-1]]
  return [*found, shape[1:], shape[:0:-1]] if len(shape) > 2 else found


def from_jaxpr(
  closed: AnyJaxpr, arguments: Sequence[Argument] = (), target: Target | None = None, devices: int = 1
) -> Program:
  """Returns the program of a closed jaxpr, in its order, without operations whose results nothing reads.

  Args:
    closed: the jaxpr.
    arguments: its arguments, with their parts of memory.
    target: the target whose layout arrays have, and whose units multiply; this machine by default.
    devices: number of devices that share the work.
  """
  target = target or get_target()
  weights = [a if a.part == "master weights" else None for a in arguments]
  jaxpr = open_jaxpr(closed)
  context = _Context(copied={*variables_of(jaxpr.outvars)})
  program = _Reader(arguments, target, devices).program(jaxpr, context, weights)
  for buffer, argument in zip(program.arguments, arguments, strict=False):
    buffer.argument, buffer.nbytes = argument, 0 if argument.on_host else argument.nbytes
  if target.kind == "gpu":
    # Kernels read the host's memory themselves, and XLA's memory scheduler copies each result when it is
    # there, so that few are on the device at once. The latency-hiding scheduler may hold more.
    for copy, _ in program.each():
      for value in (*copy.operands, *copy.writes) if copy.part == "host" else ():
        value.nbytes = 0
  return program


class _Context(NamedTuple):
  phase: str = OTHER
  path: str = ""
  source: str = ""
  # Inside a `shard_map`: the number of devices on each axis of its mesh, and the axes left to the compiler.
  axes: Mapping[str, int] = MappingProxyType({})
  left: frozenset[str] = frozenset()
  copied: Collection[Var] = ()  # the results of the step, where views of arguments need memory of their own


class _Reader:
  def __init__(self, arguments: Sequence[Argument], target: Target, devices: int) -> None:
    self._target, self._devices = target, devices
    batch = [a for a in arguments if a.part == "batch"]
    # One device's share of what depends on the batch, and of an array with a weight's shape, with padding.
    # Weights of one shape may lie on the mesh in several ways: all of them together have the right bytes.
    local = sum(array_bytes(a.local, a.dtype, "") for a in batch)
    self._share = local / max(1, sum(a.whole for a in batch)) if batch else 1.0
    shares: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
    for a in arguments:
      for shape in _like_weight(a.shape) if a.part == "master weights" and len(a.shape) > 1 else ():
        shares[shape].append(a.nbytes / max(1, a.whole))
    self._shares = {shape: statistics.mean(several) for shape, several in shares.items()}

  def program(self, jaxpr: Jaxpr, context: _Context, weights: Sequence[Argument | None]) -> Program:
    """Returns the program of a jaxpr, whose arguments are these weights, or layers of them."""
    environment = {variable: self._value(variable.aval) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    arguments = [environment[variable] for variable in jaxpr.invars]
    for argument, weight in zip(arguments, weights, strict=False):
      argument.weight = weight
    operations: list[Operation] = []
    self._run(jaxpr, environment, context, operations)
    results = [environment[v] for v in variables_of(jaxpr.outvars)]
    return Program(_needed(operations, results), results, arguments=arguments)

  def _run(
    self, jaxpr: Jaxpr, environment: dict[Var, Buffer], context: _Context, out: list[Operation]
  ) -> None:
    for equation in jaxpr.eqns:
      here = _at(equation, context)
      body = _call(equation)
      if body is None:
        operands = [environment[v] for v in variables_of(equation.invars)]
        is_result = any(v in context.copied for v in equation.outvars)
        if _is_view(equation, operands) and not (is_result and operands[0].maker is None):
          environment.update(zip(equation.outvars, operands, strict=False))
        else:
          out.append(self._operation(equation, operands, environment, here))
        continue
      opened = open_jaxpr(body)
      # The first operand of a choice by platform is the choice.
      given = equation.invars[len(equation.invars) - len(opened.invars) :]
      inner = {variable: self._value(variable.aval) for variable in opened.constvars}
      inner |= self._passed(opened.invars, given, environment)
      pairs = zip(equation.outvars, opened.outvars, strict=True)
      copied = {v for outer, v in pairs if outer in context.copied and is_variable(v)}
      self._run(opened, inner, here._replace(copied=copied), out)
      environment |= self._passed(equation.outvars, opened.outvars, inner)

  def _passed(
    self, variables: Sequence[Var], atoms: Sequence[Atom], known: Mapping[Var, Buffer]
  ) -> dict[Var, Buffer]:
    """Returns variables with the buffers of the atoms that they stand for."""
    pairs = zip(variables, atoms, strict=True)
    return {v: known[atom] if is_variable(atom) else self._value(v.aval) for v, atom in pairs}

  def _operation(
    self, equation: JaxprEqn, operands: list[Buffer], environment: dict[Var, Buffer], here: _Context
  ) -> Operation:
    kind = call_kind(equation)
    if "originals" in equation.params and not has(equation, Trait.PRODUCT):
      operands[1:] = operands[:1]  # the other one is there for a gradient alone
    results = [self._value(variable.aval, bool(here.axes)) for variable in equation.outvars]
    environment.update(zip(equation.outvars, results, strict=True))
    bodies = []
    if kind is not None and kind.is_control_flow:
      for inner, places, _ in call_layout(equation).bodies:
        atoms = [equation.invars[k] for k in places]
        weights = [environment[atom].weight if is_variable(atom) else None for atom in atoms]
        bodies.append(self.program(open_jaxpr(inner), here, weights))
    if not here.path or not here.source:
      # An operation that a transformation added does not have a name: it belongs to what it reads.
      made = next((v.maker for v in operands if v.maker is not None and v.maker.path), here)
      here = here._replace(path=here.path or made.path, source=here.source or made.source)
    operation = Operation(
      equation,
      here.phase,
      here.path,
      here.source,
      operands,
      dict.fromkeys(operands, 0.0),
      results,
      bodies=bodies,
      times=None if equation.primitive is jax.lax.while_p else times_run(equation),
      chooses=kind is CallKind.COND,
      devices=math.prod(here.axes[axis] for axis in here.left) if here.axes else self._devices,
    )
    for value in results:
      value.maker = operation
      value.weight = operands[0].weight if operands and has(equation, Trait.CAST) else None
      value.part = self._part(value, here.phase)
    self._set_work(operation, here)
    return operation

  def _part(self, value: Buffer, phase: str) -> str:
    weight = value.weight
    if weight and phase != BACKWARD and value.dtype.itemsize <= weight.dtype.itemsize:
      return "compute copies"
    return "gradients" if phase == BACKWARD and value.shape in self._shares else ""

  def _set_work(self, operation: Operation, here: _Context) -> None:
    """Sets what takes time: products, a kernel, a collective, or a transfer to or from the host."""
    equation = operation.origin
    pairs = zip(operation.operands, operation.writes, strict=False)
    stated = flops(equation)
    operation.part = "copies" if has(equation, Trait.MOVES) else "element-wise"
    if equation.primitive is jax.lax.device_put_p and any(a.on_host != b.on_host for a, b in pairs):
      operation.part = "host"
      operation.moved = sum(value.whole for value in operation.writes)
    elif name := facts(equation).collective:
      operation.part = "collectives"
      group = _group(equation, here.axes)
      size = 0 if name == "collective-permute" else group
      operation.members = range(group)
      operation.collectives = [
        Collective(name, str(value.dtype), value.whole, 1, (operation.path,), size)
        for value in (operation.writes if group > 1 else ())
      ]
    elif has(equation, Trait.KERNEL):
      operation.part = "attention kernels"
      narrow = any(narrow_bits(getattr(value.dtype, "name", "")) for value in operation.operands)
      operation.products = [fused_kernel(stated / operation.devices, narrow)]
    elif stated:
      operation.products = [product_of(equation, stated, operation.devices, self._target)]
      operation.part = "convolutions" if operation.products[0].convolution else "products"

  def _value(self, aval: AbstractValue, local: bool = False) -> Buffer:
    """Returns a value with its bytes on one device, whose shape a `local` one has already."""
    on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(np.float32))
    share, kind = self._shares.get(shape), ""
    if local or share is None:
      share, kind = 1.0 if local else self._share, self._target.kind if shape else ""
    nbytes = int(array_bytes(shape, dtype, kind) * share)
    return Buffer(shape, dtype, 0 if on_host else nbytes, on_host=on_host, whole=nbytes)


def _call(equation: JaxprEqn) -> AnyJaxpr | None:
  """Returns the jaxpr that an equation only calls, or `None`; for a choice by platform, the default."""
  kind = call_kind(equation)
  if (branch := default_branch(equation)) is not None or kind is None or kind.is_control_flow:
    return branch
  return next((body.jaxpr for body in call_layout(equation).bodies), None)


def _is_view(equation: JaxprEqn, operands: Sequence[Buffer]) -> bool:
  """Returns whether the results of an equation are the memory of its operands."""
  if has(equation, Trait.ALIAS):
    return len(operands) == len(equation.outvars)
  if len(operands) != 1 or len(equation.outvars) != 1:
    return False
  result = equation.outvars[0]
  if equation.primitive is jax.lax.broadcast_in_dim_p:
    return math.prod(operands[0].shape) == math.prod(shape_of(result))
  return equation.primitive is jax.lax.convert_element_type_p and operands[0].dtype == dtype_of(result)


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
  path, source = inside(context.path, module_path(equation)), source_line(equation) or context.source
  here = context._replace(phase=phase, path=path, source=source)
  if call_kind(equation) is not CallKind.SHARD_MAP:
    return here
  axes = {**here.axes, **equation.params["mesh"].shape}
  left = (here.left if here.axes else axes.keys()) - {*_compat.manual_axes(equation)}
  return here._replace(axes=axes, left=frozenset(left))


def _needed(operations: list[Operation], results: list[Buffer]) -> list[Operation]:
  """Returns the operations that a result depends on, or that have an effect."""
  live = set(results)
  kept = []
  for operation in reversed(operations):
    if operation.origin.effects or not live.isdisjoint(operation.writes):
      kept.append(operation)
      live.update(operation.operands)
  return kept[::-1]
