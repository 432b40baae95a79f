"""Executes a `CastPlan`: binds each operation again, in its dtype, with its casts.

`execute` is the entry point, also for code that inspects values (`Tap`).

A call keeps the promises of its primitive: the name, shardings and donation of a `jit`, the policy of a
`checkpoint`, one stable dtype for a loop's carry, the user's derivative rule of a `custom_vjp`. A custom
derivative or batching rule is a program that exists only once JAX differentiates or batches. It is traced in
its own dtypes, decided about as a whole, and emitted with its casts.
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
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import DropVar, Primitive

from mpjax import _compat
from mpjax._types import Array, Atom, Fp8State, Jaxpr, JaxprEqn, Literal, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import Call, CastPlan, Island, Mode, Node, Tap
from mpjax.casting._fp8_products import SideInputs
from mpjax.casting._gradient_sums import MANY, derivative_apart, look_up, store_gradient_p, use, widened
from mpjax.casting._half_precision import Regions, tracing
from mpjax.casting._islands import is_statistic
from mpjax.casting._kinds import FLOAT32, Held, Kind, Wide, as_dtype, as_held, castable, in_mesh_of
from mpjax.fp8 import keep_in_fp8
from mpjax.jaxpr import (
  CallKind,
  as_traced,
  backward_depth,
  call_kind,
  call_layout,
  constants_of,
  custom_jvp_rule,
  custom_vjp_rules,
  dtype_of,
  is_variable,
  joined_branches,
  last_reads,
  scan_parts,
  scopes_inside,
  scopes_of,
  shape_of,
  source_line,
  variables_of,
  while_loop,
)
from mpjax.products import as_product, bind_product, plain_primitive, spread

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
    scales, probes = self.side
    return SideInputs({i: scales[i] for i in scales.keys() & products}, {i: probes[i] for i in taps})

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
    return self._alike((_key(call.plans[0]), *map(id, constants)), own)

  def _alike(self, key: Hashable, own: Function) -> Function:
    try:
      return self.alike.setdefault(key, own)
    except TypeError:  # a parameter that cannot be compared
      return own

  def _emit(self, node: Node, values: _Environment, leave_out: int = 0) -> None:
    equation = node.equation
    with as_traced(equation, leave_out):
      originals = {i: values.read(v, FLOAT32) for i, v in node.originals().items()}
      operands = [
        _before_cast(values, atom, node)
        if i in node.widened
        else values.read(atom, dtype, apart=i in node.own_casts and i not in originals)
        for i, (atom, dtype) in enumerate(zip(equation.invars, node.reads, strict=True))
      ]
      if node.call is not None:
        out = _EMIT[call_kind(equation)](node.call, operands, self)
      else:
        out = self._bind(node, operands, originals)
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
    """Returns the results of an island from its inputs, without the scopes that its caller entered."""
    local = _Environment(held, frozenset())
    for (variable, _), array in zip(island.inputs, arrays, strict=True):
      local.write(variable, array)
    # A tap has gradients of its own.
    for unit in island.units if self.tap is None else (*island.copies, *island.nodes):
      if isinstance(unit, Node):
        self._emit(unit, local, leave_out)
        continue
      results = derivative_apart(functools.partial(self._inside, unit, held, leave_out))
      operands = [local.read(v, dtype) for v, dtype in unit.inputs]
      for (variable, _), array in zip(unit.outputs, results(*operands), strict=True):
        local.write(variable, array)
    return [local.read(v, dtype) for v, dtype in island.outputs]


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
      return own if dtype is None or dtype == dtype_of(atom) else as_dtype(own, dtype)
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
  return jnp.asarray(value.item() if getattr(literal.aval, "weak_type", False) else value)


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
  if saturates and dtype.itemsize < 4:
    # A mask of -1e9 works as well at -65504, and -inf minus -inf is NaN.
    largest = float(jnp.finfo(dtype).max)
    with in_mesh_of(jax.typeof(x)):
      x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
  return as_dtype(x, dtype)


def _common_scopes(island: Island) -> int:
  """Returns how many scopes, from the outermost on, the equations of an island have in common."""
  stacks = {n.equation.source_info.name_stack.stack for n in (*island.copies, *island.nodes)}
  return len([*itertools.takewhile(lambda scopes: len({*scopes}) == 1, zip(*stacks, strict=False))])


def _key(part: object, of: Callable[[Any], Hashable] = lambda part: part) -> Hashable:
  """Returns all that is decided in a part of a plan that reads no side inputs: equal if it is emitted alike.

  So JAX traces the layers of a deep model, and a function that they call, once. Its caches belong to the
  function that is emitted: its program, its derivative, and what that saves.

  Args:
    part: a plan, or a part of it.
    of: the key of an equation or a variable; by default itself.
  """
  if isinstance(part, CastPlan):
    return part.jaxpr, tuple(part.held[v] for v in part.inputs), part.outs, _key(part.units)
  if isinstance(part, Call):
    kind = call_kind(part.equation)
    is_plain = kind is not None and kind.is_plain  # a rule is decided where the call is
    return (part.ins, part.outs, part.carry, _key(part.plans)) if is_plain else part
  if isinstance(part, Node):
    other = ("equation", "path", "call")
    decided = [value for name, value in vars(part).items() if name not in other]
    return (of(part.equation), _key(part.call), *decided)
  if isinstance(part, Island):
    return tuple(_key(value, of) for name, value in vars(part).items() if name != "parts")
  return tuple(_key(one, of) for one in part) if type(part) is tuple else of(part)


def _island_key(island: Island, held: Mapping[Var, Held], depth: int) -> Hashable:
  """Returns the key of an island wherever it stands, without the `depth` scopes that it has in common."""
  numbers: dict[Var, int] = {}

  def of(part: Any) -> Hashable:
    if isinstance(part, Var):
      return numbers.setdefault(part, len(numbers)), part.aval, held.get(part)
    if not isinstance(part, JaxprEqn):
      return cast(Hashable, part)
    atoms = (of(a) if is_variable(a) else (np.asarray(a.val).tobytes(), a.aval) for a in part.invars)
    parameters, place = tuple(sorted(part.params.items())), scopes_inside(part, depth)
    return (part.primitive, *atoms, *map(of, part.outvars), parameters, place, source_line(part), part.ctx)

  return _key(island, of)


def _emit_jit(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  side = emit.within(call.plans)

  def inside(operands: Sequence[Array], side: SideInputs) -> list[Array]:
    return emit.body(call, side=side)(*operands)

  closed = jax.make_jaxpr(emit.once(call, side, inside))(operands, side)
  return _compat.bind_jit(call.equation, list(operands), jax.tree.leaves(side), closed)


def _emit_remat(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  side = emit.within(call.plans)
  body = emit.once(call, side, emit.body(call, side=side))
  jaxpr, constants = _compat.trace_open(body, list(operands))
  policy = call.equation.params["policy"]
  if policy is not None:
    policy = as_product(policy)
  return _compat.bind(call.equation, [*constants, *operands], jaxpr=jaxpr, policy=policy)


def _emit_scan(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  k, n, options = scan_parts(call.equation)
  side = emit.within(call.plans)
  captured = list(zip(operands[:k], call.ins[:k], strict=True))
  wide = {
    i: widened(x) for i, (x, h) in enumerate(captured) if h.kind is Kind.HALF and options["length"] > MANY
  }
  # Scales for each step: their cotangents are merged by the largest; a constant's would be added.
  scales = {number: spread(x, options["length"]) for number, x in side.scales.items()}

  def step(
    carry: Sequence[Array], row: tuple[Sequence[Array], SideInputs]
  ) -> tuple[list[Array], list[Array]]:
    xs, own = row
    read = [use(x, wide[i]) if i in wide else x for i, (x, _) in enumerate(captured)]
    out = emit.body(call, side=own)(*read, *carry, *xs)
    return _as_results(call, out[:n]), out[n:]

  carry, ys = jax.lax.scan(
    step, list(operands[k : k + n]), (operands[k + n :], side._replace(scales=scales)), **options
  )
  return [*carry, *ys]


def _emit_while(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  p = call.equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  condition, body = emit.body(call, 0), emit.body(call, 1)

  def step(carry: Sequence[Array]) -> list[Array]:
    return _as_results(call, body(*operands[first : first + second], *carry))

  go_on = lambda carry: condition(*operands[:first], *carry)[0]
  return while_loop(call.equation, go_on, step, list(operands[first + second :]))


def _emit_cond(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  def branch(i: int) -> tuple[Jaxpr, list[Array]]:
    body = emit.body(call, i)
    return _compat.trace_open(lambda *xs: _as_results(call, body(*xs)), list(operands[1:]))

  traced = [branch(i) for i in range(len(call.plans))]
  consts = [c for _, own in traced for c in own]
  branches = joined_branches(traced, list(operands[1:]))
  return _compat.bind(call.equation, [operands[0], *consts, *operands[1:]], branches=branches)


def _emit_shard_map(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  n, (arrays, structure) = len(operands), jax.tree.flatten(emit.within(call.plans))

  def inside(*xs: Array) -> tuple[Array, ...]:
    side = jax.tree.unflatten(structure, [x[0] for x in xs[n:]])
    return tuple(emit.body(call, side=side)(*xs[:n]))

  mapped, devices = _compat.shard_map_like(call.equation, inside, len(arrays))
  # Scales for each device: their cotangents are merged by the largest.
  return list(mapped(*operands, *(spread(x, devices) for x in arrays)))


def _emit_custom_jvp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_jvp_call` with the user's rule."""
  body = emit.body(call)
  rule = custom_jvp_rule(call.equation)
  inputs = call.equation.invars
  moving = [i for i, a in enumerate(inputs) if jnp.issubdtype(dtype_of(a), jnp.inexact)]

  @jax.custom_jvp
  def f(*primals: Array) -> tuple[Array, ...]:
    return tuple(body(*primals))

  @f.defjvp
  def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    still = {i: tangents[i] for i in range(len(inputs)) if i not in moving}

    def flat(*xs: Array) -> list[Array]:
      of = dict(zip(moving, xs[len(inputs) :], strict=True)) | still
      return rule(*xs[: len(inputs)], *(of[i] for i in range(len(inputs))))

    avals = [*(a.aval for a in inputs), *(inputs[i].aval for i in moving)]
    held = [*call.ins, *(call.ins[i] for i in moving)]
    values = [*primals, *(tangents[i] for i in moving)]
    out, _ = _emit_rule(call, emit, flat, avals, held, values, tangents=len(moving))
    n = len(call.outs)
    return tuple(_as_results(call, out[:n])), tuple(_as_results(call, out[n:]))

  return list(f(*operands))


def _emit_custom_vjp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vjp_call` with the user's rules."""
  body = emit.body(call)
  forward, backward = custom_vjp_rules(call.equation)
  avals = [a.aval for a in call.equation.invars]
  # Facts about the residuals, from the forward rule for the backward rule. Those that are not tracers (a
  # Python bool, an array of constants) are passed on unchanged: the backward rule may branch on them.
  is_traced: list[bool] = []
  kept_types: list[AbstractValue] = []  # the types of the tracers
  kept_held: list[Held] = []

  @jax.custom_vjp
  def f(*xs: Array) -> tuple[Array, ...]:
    return tuple(body(*xs))

  def f_forward(
    *primals: jax.custom_derivatives.CustomVJPPrimal,
  ) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    known: list[Any] = []

    def flat(*xs: Array) -> list[Array]:
      residuals, outs = forward(list(xs), [primal.perturbed for primal in primals])
      is_traced[:] = [isinstance(r, jax.core.Tracer) for r in residuals]
      kept, known[:] = _parted(is_traced, residuals)
      kept_types[:] = map(jax.typeof, kept)
      return [*outs, *kept]

    values = [primal.value for primal in primals]
    out, held = _emit_rule(call, emit, flat, avals, call.ins, values)
    n = len(call.outs)
    kept_held[:] = held[n:]
    return tuple(_as_results(call, out[:n])), tuple(_merged(is_traced, out[n:], known))

  def f_backward(residuals: Sequence[Any], cotangents: Sequence[Array]) -> tuple[Array | None, ...]:
    given: list[bool] = []  # known after the trace, as is which are gradients of parameters
    gradients: list[bool] = []
    kept, known = _parted(is_traced, residuals)
    avals_out = [v.aval for v in call.equation.outvars]
    if not _compat.takes_symbolic_zeros(call.equation):
      cotangents = [jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in cotangents]
    # Zeros stay symbolic: a batched rule asks which results have a cotangent.
    is_given = [not isinstance(g, SymbolicZero) for g in cotangents]
    moving, still = _parted(is_given, cotangents)
    zeros = [_zero_like(g, aval) for g, aval in zip(still, _parted(is_given, avals_out)[1], strict=True)]

    def flat(*xs: Array) -> list[Array]:
      of_results = _merged(is_given, xs[len(kept) :], zeros)
      out = backward(_merged(is_traced, xs[: len(kept)], known), of_results)
      given[:] = [x is not None and x.dtype != jax.dtypes.float0 for x in out]
      gradients[:] = [h.kind is Kind.FLEXIBLE for h in _parted(given, call.ins)[0]]
      return [x for x, is_given in zip(out, given, strict=True) if is_given]

    types = [*kept_types, *_parted(is_given, avals_out)[0]]
    held = [*kept_held, *_parted(is_given, call.outs)[0]]
    out, _ = _emit_rule(call, emit, flat, types, held, [*kept, *moving], gradients=gradients)
    results = iter(out)
    return tuple(as_held(next(results), h) if here else None for h, here in zip(call.ins, given, strict=True))

  # Symbolic zeros tell the rule which operands are differentiated: its constants are not.
  f.defvjp(f_forward, f_backward, symbolic_zeros=True)
  return list(f(*operands))


def _emit_custom_vmap(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vmap_call` with the user's rule."""
  body = emit.body(call)
  f = jax.custom_batching.custom_vmap(lambda *xs: tuple(body(*xs)))
  parameters = call.equation.params

  @f.def_vmap
  def _(axis_size: int, in_batched: Sequence[bool], *xs: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    out_batched: list[bool] = []

    def flat(*xs: Array) -> list[Array]:
      batched, operands = (jax.tree.unflatten(parameters["in_tree"], list(of)) for of in (in_batched, xs))
      out, batched = parameters["rule"](axis_size, batched, *operands)
      out_batched[:] = jax.tree.leaves(batched)
      return jax.tree.leaves(out)

    like = [
      jax.ShapeDtypeStruct((*([axis_size] * is_batched), *shape_of(a)), dtype_of(a))
      for a, is_batched in zip(call.equation.invars, in_batched, strict=True)
    ]
    out, _ = _emit_rule(call, emit, flat, like, call.ins, xs)
    return tuple(_as_results(call, out)), tuple(out_batched)

  return list(f(*operands))


def _emit_rule(
  call: Call,
  emit: Emitter,
  flat: Callable[..., list[Array]],
  types: Sequence[AbstractValue | jax.ShapeDtypeStruct],
  held: Sequence[Held],
  operands: Sequence[Array],
  tangents: int = 0,
  gradients: list[bool] | None = None,
) -> tuple[list[Array], tuple[Held, ...]]:
  """Returns the results of a rule, and how they are held.

  Args:
    call: the call that the rule is of.
    emit: executes plans.
    flat: the rule, as a function of arrays.
    types: those of the operands in the program's own dtypes, in which the rule is traced.
    held: how the operands are held.
    operands: the operands.
    tangents: how many of the last are tangents, in which the rule must stay linear.
    gradients: for a backward rule, which results are gradients of parameters; known after the trace.
  """
  # The rule is traced long after the function.
  with tracing(Regions(call.half, instead=tracing.value.instead)):
    closed = jax.make_jaxpr(flat)(*map(_struct, types))
  plan = call.decide(-1, closed, held, tangents=tangents, gradients=gradients)
  return emit(plan, [*constants_of(closed), *operands]), plan.outs


def _parted(flags: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
  """Returns the values with a flag, and those without."""
  pairs = list(zip(flags, values, strict=True))
  return [x for flag, x in pairs if flag], [x for flag, x in pairs if not flag]


def _merged(flags: Sequence[bool], flagged: Sequence[Any], others: Sequence[Any]) -> list[Any]:
  """Inverts `_parted`."""
  parts = iter(flagged), iter(others)
  return [next(parts[0] if flag else parts[1]) for flag in flags]


def _as_results(call: Call, out: Sequence[Array]) -> list[Array]:
  """Returns results of a call, the first or all, as they are held: a carry in one dtype for every step."""
  return [as_held(x, h) for x, h in zip(out, call.outs, strict=False)]


def _zero_like(zero: SymbolicZero, aval: AbstractValue) -> SymbolicZero:
  """Returns a zero in the dtype of the program's result; the zero of an integer result has its own dtype."""
  dtype = cast(jax.core.ShapedArray, aval).dtype
  return SymbolicZero(zero.aval.update(dtype=dtype)) if jnp.issubdtype(dtype, jnp.inexact) else zero


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# (call, operands, emit) -> results, as `call.outs` says
_EMIT: dict[CallKind | None, Callable[[Call, Sequence[Array], Emitter], list[Array]]] = {
  CallKind.JIT: _emit_jit,
  CallKind.INLINE: lambda call, operands, emit: emit.body(call)(*operands),
  CallKind.REMAT: _emit_remat,
  CallKind.SCAN: _emit_scan,
  CallKind.WHILE: _emit_while,
  CallKind.COND: _emit_cond,
  CallKind.SHARD_MAP: _emit_shard_map,
  CallKind.CUSTOM_JVP: _emit_custom_jvp,
  CallKind.CUSTOM_VJP: _emit_custom_vjp,
  CallKind.CUSTOM_VMAP: _emit_custom_vmap,
}
