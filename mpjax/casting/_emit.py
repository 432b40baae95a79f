"""Executes a `CastPlan`: binds each equation again, in its dtype, with its casts.

`execute` is the entry point, also for code that inspects values (`Tap`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import DropVar, Primitive

from mpjax._types import Array, Atom, Fp8State, Literal, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import Call, CastPlan, Island, Mode, Node, Tap
from mpjax.casting._fp8_products import SideInputs
from mpjax.casting._gradient_sums import MANY, derivative_apart, look_up, store_gradient_p, use
from mpjax.casting._higher_order import EMIT
from mpjax.casting._islands import held_dtype, is_statistic, statistics_bytes
from mpjax.casting._kinds import FLOAT32, Held, Kind, Wide, as_held, castable, in_mesh_of
from mpjax.fp8._scaling import keep_in_fp8
from mpjax.jaxpr import (
  as_traced,
  backward_depth,
  call_kind,
  call_layout,
  constants_of,
  dtype_of,
  is_variable,
  last_reads,
  scopes_inside,
  scopes_of,
  shape_of,
  source_line,
  variables_of,
)
from mpjax.products import as_product, bind_product, plain_primitive

Function = Callable[..., list[Array]]


def execute(
  plan: CastPlan,
  operands: Sequence[Array],
  *,
  fp8_state: Fp8State | None = None,
  tap: Tap | None = None,
) -> list[Array]:
  """Returns the results of a program, executed by its plan.

  Args:
    plan: the decisions.
    operands: its constants and arguments.
    fp8_state: the histories of its products under delayed FP8 scaling.
    tap: the inspection, if any. It changes nothing else.

  Raises:
    ValueError: for an `fp8_state` that is missing, or belongs to another function.
  """
  products = [(node.site, node.fp8) for node in plan.all_nodes() if node.site and node.fp8]
  side, tie = _fp8_products.open_state_for(fp8_state, products)
  if tap is not None:
    side = side._replace(tap_probes=dict(enumerate(tap.probes)))
  return _fp8_products.tie_to_state(tie, Emitter(side, tap)(plan, operands))


@dataclasses.dataclass(frozen=True)
class Emitter:
  """Executes plans: binds each equation, in its dtype.

  Attributes:
    side: what the program reads in addition to its inputs.
    tap: the inspection.
    alike: the functions of islands and bodies so far, by their keys.
  """

  side: SideInputs
  tap: Tap | None
  alike: dict[Hashable, Function] = dataclasses.field(default_factory=dict)

  def __call__(self, plan: CastPlan, inputs: Sequence[Array]) -> list[Array]:
    """Returns the outputs of a program, each held as `plan.outs` says, from its constants and arguments.

    Float32 inputs are in the dtype in which the plan holds them.
    """
    values = _Environment(plan.held, _used_often(plan))
    for variable, value in zip(plan.inputs, inputs, strict=True):
      values.write(variable, value)
    for unit, expired in zip(plan.units, _expired(plan), strict=True):
      if isinstance(unit, Island):
        with in_mesh_of(unit.outputs[0][0].aval):
          self._emit_island(unit, values)
      else:
        self._emit(unit, values)
      values.free(expired)
    return [values.output(atom, held) for atom, held in zip(plan.jaxpr.outvars, plan.outs, strict=True)]

  def within(self, plans: Sequence[CastPlan]) -> SideInputs:
    """Returns the side inputs that some plans read."""
    nodes = [node for plan in plans for node in plan.all_nodes()]
    products = {node.fp8.number for node in nodes if node.fp8 is not None}
    numbers = self.tap.numbers if self.tap else {}
    taps = [numbers[node, i] for node in nodes for i in range(len(node.outs)) if (node, i) in numbers]
    return self.side.select(products, taps)

  def body(self, call: Call, i: int = 0, side: SideInputs | None = None) -> Function:
    """Returns the i-th body of a call as a function of its inputs, closed over its constants and `side`."""
    constants = constants_of(call_layout(call.equation).bodies[i].jaxpr)
    emit = self if side is None else dataclasses.replace(self, side=side)
    return lambda *operands: emit(call.plans[i], [*constants, *operands])

  def once(self, call: Call, side: SideInputs, own: Function) -> Function:
    """Returns the function of an equal body that was emitted before; `own` if there is none."""
    if self.tap is not None or jax.tree.leaves(side):
      return own
    constants = constants_of(call_layout(call.equation).bodies[0].jaxpr)  # `own` keeps them alive
    return self._alike((_plan_key(call.plans[0]), *map(id, constants)), own)

  def _alike(self, key: Hashable, own: Function) -> Function:
    try:
      return self.alike.setdefault(key, own)
    except TypeError:  # a parameter that cannot be compared
      return own

  def _emit(self, node: Node, values: _Environment, leave_out: int = 0) -> None:
    equation = node.equation
    with as_traced(equation, leave_out):
      own = zip(sorted(node.own_casts), node.originals(), strict=False)
      originals = {i: values.read(v, FLOAT32) for i, v in own}
      operands = [
        _before_cast(values, atom, node)
        if i in node.widened
        else values.read(atom, dtype, apart=i in node.own_casts and i not in originals)
        for i, (atom, dtype) in enumerate(zip(equation.invars, node.reads, strict=True))
      ]
      if node.call is None:
        out = self._bind(node, operands, originals)
    if node.call is not None:
      out = EMIT[call_kind(equation)](node.call, operands, self)
    for i, (variable, value) in enumerate(zip(equation.outvars, out, strict=True)):
      kept = as_held(value, node.outs[i]) if castable(variable.aval) else value
      if self.tap is not None and (node, i) in self.tap.numbers:
        kept = self.tap.look(kept, self.side.tap_probes[self.tap.numbers[node, i]])
      values.write(variable, kept)

  def _bind(self, node: Node, operands: list[Array], originals: Mapping[int, Array]) -> list[Array]:
    if node.fp8 is not None:
      return [
        _fp8_products.emit(node.fp8, node.equation, operands, self.side, cast(np.dtype, node.result_dtype))
      ]
    if node.mode is Mode.EACH and node.equation.primitive is jax.lax.convert_element_type_p:
      return [as_held(x, h) for x, h in zip(operands, node.outs, strict=True)]
    if node.mode is Mode.EDGE:
      # In the backward pass the loss scale must see an infinity.
      forward = not backward_depth(node.equation)
      return [_narrow(x, cast(np.dtype, node.half), forward and x.dtype == FLOAT32) for x in operands]
    if node.adds_many:
      return look_up(node.equation, operands)
    changes = {} if node.result_dtype is None else {"preferred_element_type": node.result_dtype}
    return bind_product(node.equation, operands, originals, **changes)

  def _emit_island(self, island: Island, values: _Environment) -> None:
    apart = {n.equation.invars[i] for n in island.nodes for i in n.own_casts}
    apart -= {v for v, dtype in island.inputs if dtype == FLOAT32}
    operands = [values.read(v, dtype, apart=v in apart) for v, dtype in island.inputs]
    stores = [v is island.loss_of for v, _ in island.inputs]
    operands = [store_gradient_p.bind(x) if own else x for x, own in zip(operands, stores, strict=True)]
    if island.saved is not None:
      out = self._saving_in_fp8(island, values, island.saved, operands)
    else:
      products = frozenset(plain_primitive(n.equation.primitive) for n in island.nodes if n.listed == "allow")
      depth = _common_scopes(island)
      inside: Function = functools.partial(self._inside, island, values.held, depth)
      if self.tap is None and not any(n.fp8 for n in island.nodes):  # only arrays go in
        alone = Emitter(SideInputs({}, {}), None)  # or the function would keep this trace's tracers
        own = functools.partial(alone._inside, island, values.held, depth)
        inside = self._alike(_island_key(island, values.held, depth), own)
      with scopes_of(island.nodes[0].equation, depth):
        out = jax.checkpoint(inside, policy=_saved(products), prevent_cse=island.fenced)(*operands)
    for (variable, _), value in zip(island.outputs, out, strict=True):
      values.write(variable, value)

  def _saving_in_fp8(
    self, island: Island, values: _Environment, dtype: np.dtype, operands: Sequence[Array]
  ) -> list[Array]:
    """Returns the results of an island whose half-precision inputs are kept in FP8."""
    n, (arrays, structure) = len(operands), jax.tree.flatten(self.side)

    def inside(*xs: Array) -> list[Array]:
      emit = dataclasses.replace(self, side=jax.tree.unflatten(structure, xs[n:]))
      return emit._inside(island, values.held, 0, *xs[:n])

    narrow = [
      values.held[v].kind is Kind.HALF and x.ndim > 0
      for (v, _), x in zip(island.inputs, operands, strict=True)
    ]
    return keep_in_fp8(inside, [*narrow, *(False,) * len(arrays)], dtype)(*operands, *arrays)

  def _inside(self, island: Island, held: Mapping[Var, Held], leave_out: int, *arrays: Array) -> list[Array]:
    """Returns the results of an island from its inputs, without the scopes that its caller entered.

    The backward pass computes what products at its end read, and the derivative of that, apart: from one
    computation of both, XLA for a GPU keeps the inside in float32.
    """
    local = _Environment(held, frozenset())
    for (variable, _), array in zip(island.inputs, arrays, strict=True):
      local.write(variable, array)
    # A tap has gradients of its own.
    first, apart, ends = _parts(island, held) if self.tap is None else (island.nodes, None, ())
    for node in (*island.copies, *first):
      self._emit(node, local, leave_out)
    if apart is not None:
      results = derivative_apart(functools.partial(self._inside, apart, held, leave_out))
      operands = [local.read(v, dtype) for v, dtype in apart.inputs]
      for (variable, _), array in zip(apart.outputs, results(*operands), strict=True):
        local.write(variable, array)
    for node in ends:
      self._emit(node, local, leave_out)
    return [local.read(v, dtype) for v, dtype in island.outputs]


def _parts(island: Island, held: Mapping[Var, Held]) -> tuple[Sequence[Node], Island | None, Sequence[Node]]:
  """Returns the parts of an island: what is made of arguments, what products at its end read, and these.

  Without a barrier, or without such products, all is in the first; also if statistics are saved inside, which
  would be computed twice.
  """
  ends = [node for node in island.nodes if node.listed == "allow"]
  if not (ends and island.fenced) or any(statistics_bytes(node.equation) for node in island.nodes):
    return island.nodes, None, ()
  moving = {v for v, _ in island.inputs if castable(v.aval) and held[v].kind is not Kind.FLEXIBLE}
  first: list[Node] = []
  others: list[Node] = []
  for node in (node for node in island.nodes if node.listed != "allow"):
    depends = not moving.isdisjoint(variables_of(node.equation.invars))
    moving.update(node.equation.outvars if depends else ())
    (others if depends else first).append(node)
  if not others:
    return island.nodes, None, ()
  read = {v for node in others for v in variables_of(node.equation.invars)}
  made = {v: held_dtype(v, held) for node in first for v in node.equation.outvars}
  inputs = tuple((v, dtype) for v, dtype in (*island.inputs, *made.items()) if v in read)
  return first, Island(tuple(others), inputs, _read_of(others, ends, island.outputs)), ends


def _read_of(
  nodes: Sequence[Node], readers: Sequence[Node], outputs: Sequence[tuple[Var, np.dtype]]
) -> tuple[tuple[Var, np.dtype], ...]:
  """Returns which results of some equations others read, or are returned, each with its dtypes."""
  made = {v for node in nodes for v in node.equation.outvars}
  read = [
    (a, FLOAT32 if i in node.own_casts | node.widened else dtype or dtype_of(a))
    for node in readers
    for i, (a, dtype) in enumerate(zip(node.equation.invars, node.reads, strict=True))
    if is_variable(a)
  ]
  return tuple(dict.fromkeys((v, dtype) for v, dtype in (*read, *outputs) if v in made))


class _Environment:
  """The arrays of a program that is being emitted; each in every dtype requested so far."""

  def __init__(self, held: Mapping[Var, Held], used_often: Collection[Var]):
    self.held = held
    self._used_often = used_often
    self._arrays: dict[Var, dict[np.dtype | None, Array]] = {}

  def write(self, variable: Var, value: Array) -> None:
    """Stores a value in its dtype, next to other copies of it."""
    if not isinstance(variable, DropVar):
      self._arrays.setdefault(variable, {})[getattr(value, "dtype", None)] = value

  def read(self, atom: Atom, dtype: np.dtype | None, *, apart: bool = False) -> Array:
    """Returns a value in a dtype; `None`, for values that are not float32 in the user's program: unchanged.

    `apart` makes a separate cast for this reader.
    """
    if not is_variable(atom):
      keep = not castable(atom.aval) or dtype == FLOAT32
      return cast(Array, atom.val if keep else np.asarray(atom.val).astype(dtype))
    copies = self._arrays[atom]
    if not castable(atom.aval):
      own = next(iter(copies.values()))
      return own if dtype is None or dtype == dtype_of(atom) else _narrow(own, dtype, False)
    if dtype not in copies or (apart and dtype != self.held[atom].dtype):
      held = self.held[atom]
      source = copies[held.dtype] if held.dtype in copies else next(iter(copies.values()))
      narrow = _narrow(source, cast(np.dtype, dtype), held.wide is Wide.SATURATES)
      if apart:
        return narrow
      copies[dtype] = narrow
    if atom in self._used_often and dtype != FLOAT32:
      return use(copies[dtype], self.read(atom, FLOAT32))
    return copies[dtype]

  def output(self, atom: Atom, held: Held) -> Array:
    """Returns a result as an array, also if the program returns a constant."""
    if is_variable(atom):
      return self.read(atom, held.dtype)
    array = array_of(atom)
    return array if array.dtype == held.dtype else array.astype(held.dtype)

  def free(self, variables: Sequence[Var]) -> None:
    """Drops all copies of values that nothing reads any more."""
    for variable in variables:
      self._arrays.pop(variable, None)


def array_of(literal: Literal) -> Array:
  """Returns a literal as an array of its type."""
  value = np.asarray(literal.val)
  return jnp.asarray(value.item()) if getattr(literal.aval, "weak_type", False) else jnp.asarray(value)


@functools.cache
def _saved(products: frozenset[Primitive]) -> Callable[..., bool]:
  """Returns the policy of an island's checkpoint: it saves statistics, and products of these primitives."""

  def is_saved(primitive: Primitive, *operands: AbstractValue, **parameters: Any) -> bool:
    return primitive in products or is_statistic(primitive, operands, parameters)

  return as_product(is_saved)


def _expired(plan: CastPlan) -> list[list[Var]]:
  """Returns, for each unit of a plan, the variables that nothing reads after it."""
  groups = [(*unit.copies, *unit.nodes) if isinstance(unit, Island) else (unit,) for unit in plan.units]
  return last_reads([[a for n in nodes for a in n.equation.invars] for nodes in groups], plan.jaxpr.outvars)


def _used_often(plan: CastPlan) -> set[Var]:
  """Returns the values of a program that are used many times."""
  uses = Counter(a for node in plan.nodes for a in variables_of(node.equation.invars))
  return {v for v, n in uses.items() if n > MANY and castable(v.aval)}


def _before_cast(values: _Environment, atom: Atom, node: Node) -> Array:
  """Returns an operand whose cast comes after its broadcast, so that its gradient is summed in float32."""
  wide = values.read(atom, FLOAT32)
  if node.equation.primitive is jax.lax.broadcast_in_dim_p:
    return wide
  return jax.lax.convert_element_type(
    jnp.broadcast_to(wide, shape_of(node.equation.outvars[0])), cast(np.dtype, node.half)
  )


def _narrow(x: Array, dtype: np.dtype, saturates: bool) -> Array:
  with in_mesh_of(jax.typeof(x)):
    if saturates and dtype.itemsize < 4:
      # A mask of -1e9 works as well at -65504, and -inf minus -inf is NaN.
      largest = float(jnp.finfo(dtype).max)
      x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
    return jax.lax.convert_element_type(x, dtype)


def _island_key(island: Island, held: Mapping[Var, Held], depth: int) -> Hashable:
  """Returns a key of an island that reads no side inputs: equal for two that one function computes.

  So JAX traces the layers of a deep model once. Its caches belong to the function: its program, its
  derivative, and what that saves.

  Args:
    island: the island.
    held: how each variable is held.
    depth: how many scopes the equations have in common, which the function leaves out.
  """
  numbers: dict[Var, int] = {}

  def of(atom: Atom) -> Hashable:
    if is_variable(atom):
      return numbers.setdefault(atom, len(numbers)), atom.aval, held.get(atom)
    return np.asarray(atom.val).tobytes(), atom.aval

  def of_node(node: Node) -> Hashable:
    equation = node.equation
    atoms = (*equation.invars, *equation.outvars)
    parameters = tuple(sorted(equation.params.items()))
    place = scopes_inside(equation, depth), source_line(equation), equation.ctx
    return equation.primitive, tuple(map(of, atoms)), parameters, place, _decisions_of(node)

  inputs, outputs = (tuple((of(v), d) for v, d in pairs) for pairs in (island.inputs, island.outputs))
  nodes = tuple(map(of_node, (*island.copies, *island.nodes)))
  return inputs, nodes, outputs, len(island.copies), island.fenced, island.saved


def _plan_key(plan: CastPlan) -> Hashable:
  """Returns the key of a body's plan that reads no side inputs; plans of other jaxprs are never equal."""
  return plan.jaxpr, tuple(plan.held[v] for v in plan.inputs), plan.outs, tuple(map(_unit_key, plan.units))


def _unit_key(unit: Node | Island) -> Hashable:
  if isinstance(unit, Island):
    copies, nodes = (tuple(map(_unit_key, nodes)) for nodes in (unit.copies, unit.nodes))
    return copies, nodes, unit.inputs, unit.outputs, unit.fenced, unit.saved, unit.loss_of
  return unit.equation, _decisions_of(unit)


def _decisions_of(node: Node) -> Hashable:
  """Returns all that is decided about an equation."""
  other = ("equation", "path", "call")
  return *(x for name, x in vars(node).items() if name not in other), node.call and _call_key(node.call)


def _call_key(call: Call) -> Hashable:
  kind = call_kind(call.equation)
  if kind is None or not kind.is_plain:  # a rule is decided where the call is
    return call
  return call.ins, call.outs, call.carry, tuple(map(_plan_key, call.plans))


def _common_scopes(island: Island) -> int:
  """Returns how many scopes, from the outermost on, the equations of an island have in common."""
  stacks = {n.equation.source_info.name_stack.stack for n in (*island.copies, *island.nodes)}
  return len([*itertools.takewhile(lambda scopes: len({*scopes}) == 1, zip(*stacks, strict=False))])
