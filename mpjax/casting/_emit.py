"""Carries out a plan: binds each equation again, in its dtype, with the casts that belong there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax.casting import _fp8_products, _higher_order
from mpjax.casting._decide import Mode, Node, Plan
from mpjax.casting._fp8_products import Histories
from mpjax.casting._islands import Island, read_dtype, saved_dtype, schedule
from mpjax.casting._kinds import Held, Kind, castable
from mpjax.fp8._dot_general import fp8_dot_general_p
from mpjax.fp8._saved_operands import keep_in_fp8
from mpjax.jaxpr import Trait, call_kind, has


@dataclasses.dataclass(frozen=True)
class Run:
  """Carries out plans.

  Attributes:
    histories: under delayed FP8 scaling, scales by site and probes by number of the product; and the probes
      of values that are looked at.
    look: (value, probe) -> value, for those.
  """

  histories: Histories = dataclasses.field(default_factory=Histories)
  look: Callable[[Any, Any], Any] | None = None

  def __call__(self, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a planned program, each in the dtype of `plan.outs`.

    Args:
      plan: the plan.
      inputs: constants and arguments; float32 ones in the dtype in which the plan holds them.
    """
    return _carry_out(plan, inputs, self)

  def within(self, plans: Sequence[Plan]) -> Histories:
    """The histories of the products in some plans, and the probes of what is looked at there."""
    nodes = [node for plan in plans for node in plan.all_nodes()]
    numbers = [n for node in nodes for n in node.watched.values()]
    return self.histories.of([node.fp8 for node in nodes if node.fp8], numbers)

  def replace(self, histories: Histories) -> Run:
    """The same with other histories."""
    return Run(histories, self.look)


def _carry_out(plan: Plan, inputs: Sequence[Any], run: Run) -> list[Any]:
  values = Values(plan, run)
  for variable, value in zip(plan.inputs, inputs, strict=True):
    values.write(variable, value)
  for unit in schedule(plan):
    if isinstance(unit, Island):
      _emit_island(unit, values)
    else:
      emit(unit, values)
  return [values.output(atom, held) for atom, held in zip(plan.jaxpr.outvars, plan.outs, strict=True)]


class Values:
  """The arrays of a program that is being carried out; each in the dtypes it has been asked for."""

  def __init__(self, plan: Plan, run: Run):
    self.plan = plan
    self.run = run
    self._arrays: dict[Any, dict[Any, Any]] = {}

  def write(self, variable: Any, value: Any) -> None:
    """Keeps a value in the dtype it comes in, beside other copies of it."""
    if type(variable).__name__ != "DropVar":
      self._arrays.setdefault(variable, {})[getattr(value, "dtype", None)] = value

  def read(self, atom: Any, dtype: Any) -> Any:
    """A value in a dtype; anything that is not float32 in the user's program comes as it is."""
    if not _compat.is_variable(atom):
      return atom.val if not castable(atom.aval) or atom.aval.dtype == dtype else _literal(atom.val, dtype)
    copies = self._arrays[atom]
    if not castable(atom.aval):
      return next(iter(copies.values()))
    if dtype not in copies:
      held = self.plan.held[atom]
      source = copies[held.dtype] if held.dtype in copies else next(iter(copies.values()))
      copies[dtype] = _narrow(source, dtype, held.wide)
    return copies[dtype]

  def output(self, atom: Any, held: Held) -> Any:
    """A result, which is an array also where the program returns a constant."""
    if _compat.is_variable(atom):
      return self.read(atom, held.dtype)
    value = np.asarray(atom.val)
    array = jnp.asarray(value.item()) if atom.aval.weak_type else jnp.asarray(value)
    return array if array.dtype == held.dtype else array.astype(held.dtype)

  def copy(self, variables: Sequence[tuple[Any, Any]], arrays: Sequence[Any], run: Run) -> Values:
    """The values of an island: what it reads, and nothing else."""
    values = Values(self.plan, run)
    for (variable, _), array in zip(variables, arrays, strict=True):
      values.write(variable, array)
    return values


def emit(node: Node, values: Values) -> None:
  """Carries out one equation."""
  equation = node.equation
  if node.mode is Mode.ENTER:
    with _compat.at(equation):
      operands = [values.read(a, h.dtype) for a, h in zip(equation.invars, node.call.ins, strict=True)]
    out = _higher_order.RULES[call_kind(equation)].emit(node.call, operands, values.run)
  elif node.fp8 is not None:
    with _compat.at(equation):
      out = [_quantised(node, values)]
  else:
    with _compat.at(equation):
      out = _EMIT[node.mode](node, values)
  for i, (variable, value) in enumerate(zip(equation.outvars, out, strict=True)):
    kept = _higher_order.cast(value, node.outs[i]) if castable(variable.aval) else value
    if i in node.watched and values.run.look is not None:
      kept = values.run.look(kept, values.run.histories.watches[node.watched[i]])
    values.write(variable, kept)


def _emit_as_written(node: Node, values: Values) -> list[Any]:
  equation = node.equation
  return _compat.bind(equation, [values.read(a, getattr(a.aval, "dtype", None)) for a in equation.invars])


def _emit_half(node: Node, values: Values) -> list[Any]:
  equation, half = node.equation, node.half
  if _compat.bodies(equation):  # relu and its like: in float32 between casts that fuse away
    return _emit_as_written(node, values)
  if equation.primitive is jax.lax.broadcast_in_dim_p:
    return [_broadcast(equation, values, half)]
  shape, broadcasts = equation.outvars[0].aval.shape, has(equation, Trait.BROADCASTS)
  operands = [_operand(a, shape, values, half, broadcasts) for a in equation.invars]
  changes = {}
  if equation.params.get("preferred_element_type") is not None:
    changes["preferred_element_type"] = np.dtype(node.half)
  if (
    node.listed == "allow"
    and values.plan.rules.accum_dtype is not None
    and "preferred_element_type" in equation.params
  ):
    changes["preferred_element_type"] = values.plan.rules.accum_dtype
  return _compat.bind(equation, operands, **changes)


def _quantised(node: Node, values: Values) -> Any:
  operands = [
    values.read(a, read_dtype(values.plan, node, a)) if castable(a.aval) else values.read(a, None)
    for a in node.equation.invars
  ]
  out_dtype = node.outs[0].dtype if node.mode is Mode.HALF else node.equation.outvars[0].aval.dtype
  out_dtype = values.plan.rules.accum_dtype or out_dtype
  return _fp8_products.emit(node.fp8, node.equation, operands, values.run.histories, out_dtype)


def _operand(atom: Any, shape: tuple[int, ...], values: Values, half: Any, broadcasts: bool) -> Any:
  """An operand in half precision, cast after its broadcast, so that its gradient is summed in float32."""
  if broadcasts and _compat.is_variable(atom) and castable(atom.aval) and atom.aval.shape != shape:
    wide = values.read(atom, jnp.float32)
    return jax.lax.convert_element_type(jnp.broadcast_to(wide, shape), half)
  return values.read(atom, half)


def _broadcast(equation: Any, values: Values, half: Any) -> Any:
  (operand,) = equation.invars[:1]
  if operand.aval.size == equation.outvars[0].aval.size or not _compat.is_variable(operand):
    return _compat.bind(equation, [values.read(a, half) for a in equation.invars])[0]
  out = _compat.bind(equation, [values.read(a, a.aval.dtype) for a in equation.invars])[0]
  return jax.lax.convert_element_type(out, half)


def _emit_each(node: Node, values: Values) -> list[Any]:
  equation = node.equation
  operands = [values.read(a, values.plan.how(a).dtype) for a in equation.invars]
  if equation.primitive is jax.lax.convert_element_type_p:
    return [_higher_order.cast(x, h) for x, h in zip(operands, node.outs, strict=True)]
  return _compat.bind(equation, operands)


def _emit_cast(node: Node, values: Values) -> list[Any]:
  (atom,) = node.equation.invars
  operand = values.read(atom, values.plan.how(atom).dtype if castable(atom.aval) else atom.aval.dtype)
  return _compat.bind(node.equation, [operand])


def _emit_island(island: Island, values: Values) -> None:
  inside = lambda *arrays: _inside(island, values, arrays, values.run)
  operands = [values.read(v, dtype) for v, dtype in island.inputs]
  dtype = saved_dtype(island, values.plan)
  if dtype is not None:
    _emit_saving(island, values, dtype, operands)
    return
  products = {
    fp8_dot_general_p if node.fp8 else node.equation.primitive
    for node in island.nodes
    if node.listed == "allow"
  }
  save = lambda primitive, *_, **__: primitive in products
  out = jax.checkpoint(inside, policy=save if products else None)(*operands)
  for (variable, _), value in zip(island.outputs, out, strict=True):
    values.write(variable, value)


def _emit_saving(island: Island, values: Values, dtype: Any, operands: list[Any]) -> None:
  """An island of which half-precision inputs are kept in FP8."""
  n, histories = len(operands), values.run.histories
  inside = lambda *xs: _inside(island, values, xs[:n], values.run.replace(histories.with_arrays(xs[n:])))
  narrow = [
    values.plan.held[v].kind is Kind.HALF and x.ndim > 0
    for (v, _), x in zip(island.inputs, operands, strict=True)
  ]
  arrays = histories.arrays
  out = keep_in_fp8(inside, [*narrow, *(False,) * len(arrays)], dtype)(*operands, *arrays)
  for (variable, _), value in zip(island.outputs, out, strict=True):
    values.write(variable, value)


def _inside(island: Island, values: Values, arrays: Sequence[Any], run: Run) -> list[Any]:
  """The results of an island, from what it reads."""
  local = values.copy(island.inputs, arrays, run)
  for node in island.nodes:
    emit(node, local)
  return [local.read(v, dtype) for v, dtype in island.outputs]


def _literal(value: Any, dtype: Any) -> Any:
  return np.asarray(value).astype(dtype)


def _narrow(x: Any, dtype: Any, wide: bool) -> Any:
  if wide and np.dtype(dtype).itemsize < 4:
    # A mask of -1e9 is as good at -65504, and -inf minus -inf is not a number.
    largest = float(jnp.finfo(dtype).max)
    x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
  return jax.lax.convert_element_type(x, dtype)


_EMIT = {
  Mode.HALF: _emit_half,
  Mode.FULL: _emit_as_written,
  Mode.KEEP: _emit_as_written,
  Mode.EACH: _emit_each,
  Mode.CAST: _emit_cast,
}
