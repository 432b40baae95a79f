"""Evaluates a traced program operation by operation, and records the origin of each non-finite value.

There are three kinds of non-finite values. A non-finite operand explains the first kind, which inherits its
origins. The second kind is new: its operation is an origin. The third kind is intended, such as an infinity
in the program or in a mask, until an operation turns it into NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import AnyJaxpr, Array, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr import (
  CallKind,
  Trait,
  as_function,
  bodies_of,
  call_kind,
  call_layout,
  constants_of,
  has,
  is_variable,
  needed_inside,
  open_jaxpr,
  where_rows,
)
from mpjax.loss_scale import NonFinite, is_inexact
from mpjax.numerics.nonfinite._origins import (
  Origin,
  count,
  describe,
  float32_largest,
  is_finite,
  made_here,
  of_places,
)
from mpjax.numerics.nonfinite._places import EvaluationOrder, Place, evaluation_order

# Enough to tell independent failures apart; after a divergence everywhere, thousands would say no more.
_MOST_ORIGINS = 64
_MOST_BLAMED = 24
# The most iterations of one loop that run operation by operation although their inputs are non-finite.
_MOST_TAKEN_APART = 16
_MOST_ITERATIONS = 10_000
Blame = frozenset[int]
_FINITE: Blame = frozenset()


class BlamedArray(NamedTuple):
  """An array of the program, and the sources of its non-finite values.

  Attributes:
    array: its value.
    blame: indices into `Evaluation.sources`; empty for a finite array.
    constant: whether it is computed from literals only.
  """

  array: Array
  blame: Blame = _FINITE
  constant: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
  """A source of non-finite values: an operation, or an input of the program.

  Attributes:
    origin: the operation; `None` for an input.
    name: name of the input.
    counts: counts of the input's non-finite values.
    meant: whether its infinities are probably intended.
  """

  origin: Origin | None
  name: str = ""
  counts: NonFinite | None = None
  meant: bool = False


class Evaluation:
  """One evaluation of a program.

  Attributes:
    sources: the sources of non-finite values: the inputs, then operations in program order.
  """

  def __init__(self, accumulate: int = 1):
    self.sources: list[Source] = []
    self._accumulate = accumulate
    # The keys are ids; the objects are kept, so that no other object gets the same id.
    self._constants: dict[int, tuple[Literal | Array, int]] = {}
    self._orders: dict[tuple[Jaxpr, tuple[bool, ...]], EvaluationOrder] = {}

  def run(
    self, closed: ClosedJaxpr, inputs: Sequence[tuple[str, Array, bool]], place: Place
  ) -> list[BlamedArray]:
    """Evaluates a program.

    Args:
      closed: a closed jaxpr.
      inputs: the name and array of each, and whether negative infinities in it are intended.
      place: the place of the program, with the results that the loss depends on.
    """
    return self._body(closed, [self._input(*item) for item in inputs], place)

  def _input(self, name: str, array: Array, may_mask: bool) -> BlamedArray:
    if is_finite(array):
      return BlamedArray(array)
    counts = count(array)
    meant = may_mask and not counts.nan and not counts.posinf
    return BlamedArray(array, frozenset({self._add(Source(None, name, counts, meant))}))

  def _add(self, source: Source) -> int:
    self.sources.append(source)
    return len(self.sources) - 1

  def _body(self, jaxpr: AnyJaxpr, values: list[BlamedArray], place: Place) -> list[BlamedArray]:
    """Evaluates a jaxpr; empties the list of values, so that they are freed after their last use."""
    body = open_jaxpr(jaxpr)
    constants = [BlamedArray(c) for c in constants_of(jaxpr)]
    environment = dict(zip(body.constvars, constants, strict=True))
    order = self._order(body, place.of_loss)
    arguments = zip(body.invars, values, strict=True)
    environment |= ((variable, value) for variable, value in arguments if variable in order.read)
    values.clear()
    for variable, value in zip(body.constvars, constants, strict=True):
      if not is_finite(value.array):
        blame = frozenset({self._constant(value.array, None, place)})
        environment[variable] = value._replace(blame=blame)
    constants.clear()
    for equation, last in zip(order.equations, order.last, strict=True):
      here = place.at(equation, [v in order.of_loss for v in equation.outvars])
      operands = [self._read(environment, atom, equation, here) for atom in equation.invars]
      for variable in last:
        environment.pop(variable, None)
      rule = _RULES[call_kind(equation)]
      for variable, value in zip(equation.outvars, rule(self, equation, operands, here), strict=True):
        if variable in order.read:
          environment[variable] = value
      del operands
    return [self._read(environment, atom, None, place) for atom in body.outvars]

  def _read(
    self, environment: dict[Var, BlamedArray], atom: Atom, equation: JaxprEqn | None, place: Place
  ) -> BlamedArray:
    if is_variable(atom):
      return environment[atom]
    if not is_inexact(atom.val) or np.isfinite(np.asarray(atom.val, np.complex64)).all():
      return BlamedArray(atom.val, constant=True)
    return BlamedArray(atom.val, frozenset({self._constant(atom, equation, place)}), constant=True)

  def _constant(self, what: Literal | Array, equation: JaxprEqn | None, place: Place) -> int:
    """Returns the index of the source for an infinity in the program itself."""
    if id(what) not in self._constants:
      array = what.val if isinstance(what, Literal) else what
      origin = dataclasses.replace(_origin(equation, [], array, place), constant=True)
      self._constants[id(what)] = what, self._add(Source(origin, meant=True))
    return self._constants[id(what)][1]

  def _order(self, jaxpr: Jaxpr, of_loss: tuple[bool, ...]) -> EvaluationOrder:
    if (jaxpr, of_loss) not in self._orders:
      self._orders[jaxpr, of_loss] = evaluation_order(jaxpr, of_loss)
    return self._orders[jaxpr, of_loss]

  def _operation(self, equation: JaxprEqn, operands: list[BlamedArray], place: Place) -> list[BlamedArray]:
    arrays = _bind(equation, [x.array for x in operands])
    return self._judged(equation, operands, arrays, place)

  def _judged(
    self, equation: JaxprEqn, operands: list[BlamedArray], arrays: list[Array], place: Place
  ) -> list[BlamedArray]:
    """Returns the results of an operation, with their blame."""
    constant = all(x.constant for x in operands)
    each = has(equation, Trait.EACH) and len(operands) == len(arrays)
    inherited = frozenset().union(*(x.blame for x in operands))
    new: Blame | None = None
    values = []
    for i, array in enumerate(arrays):
      if is_finite(array):
        values.append(BlamedArray(array, constant=constant))
        continue
      blame = operands[i].blame if each else inherited
      if self._is_new(equation, operands, array, blame):
        if new is None:
          new = frozenset({self._new(equation, operands, array, place, constant)})
        blame |= new
      values.append(BlamedArray(array, self._shortened(blame), constant))
    return values

  def _new(
    self,
    equation: JaxprEqn,
    operands: list[BlamedArray],
    array: Array,
    place: Place,
    constant: bool,
    whole: bool = False,
  ) -> int:
    origin = _origin(equation, [x.array for x in operands], array, place, whole)
    # A NaN operand without an earlier fault is the program's own; it is never intended to spread.
    own = any(o.nonfinite.nan for o in origin.operands)
    own = constant or (own and all(self.sources[i].meant for x in operands for i in x.blame))
    meant = constant and not origin.nonfinite.nan
    return self._add(Source(dataclasses.replace(origin, constant=own), meant=meant))

  def _shortened(self, blame: Blame) -> Blame:
    if len(blame) <= _MOST_BLAMED:
      return blame
    return frozenset(sorted(blame, key=lambda i: (self.sources[i].meant, i))[:_MOST_BLAMED])

  def _is_new(self, equation: JaxprEqn, operands: list[BlamedArray], array: Array, blame: Blame) -> bool:
    """Returns whether the operands do not explain a non-finite result."""
    if not blame:
      return True
    if len(self.sources) >= _MOST_ORIGINS:
      return False
    meant = all(self.sources[i].meant for i in blame)
    if meant and count(array).nan:
      return True
    floating = [x.array for x in operands if is_inexact(x.array)]
    if of_places(equation, floating, array.shape):
      return bool(made_here(array, floating))
    if meant and has(equation, Trait.ACCUMULATES):
      finite = [_without_infinities(x.array) if x.blame else x.array for x in operands]
      return not all(is_finite(x) for x in _bind(equation, finite))
    return False

  def _call(self, equation: JaxprEqn, operands: list[BlamedArray], place: Place) -> list[BlamedArray]:
    return self._body(bodies_of(equation)[0], operands, place)

  def _cond(self, equation: JaxprEqn, operands: list[BlamedArray], place: Place) -> list[BlamedArray]:
    branches = equation.params["branches"]
    index = min(max(int(operands[0].array), 0), len(branches) - 1)
    return self._body(branches[index], operands[1:], place)

  def _scan(self, equation: JaxprEqn, operands: list[BlamedArray], place: Place) -> list[BlamedArray]:
    """Evaluates a loop as a whole, then iteration by iteration if a result is non-finite."""
    arrays = _bind(equation, [x.array for x in operands])
    if all(map(is_finite, arrays)):
      return [BlamedArray(array) for array in arrays]
    length, layout = equation.params["length"], call_layout(equation)
    first, last = layout.carry.start, layout.carry.stop
    own = self._accumulate > 1 and not place.iterations and not place.module and length == self._accumulate
    (of_loss,) = needed_inside(equation, place.of_loss)
    inside = dataclasses.replace(place, of_loss=tuple(of_loss))
    iterations = _Iterations(self, layout.bodies[0].jaxpr, inside)
    carry, n = operands[first:last], last - first
    blames = [_FINITE] * len(arrays)
    for i in reversed(range(length)) if equation.params["reverse"] else range(length):
      rows = [_row_of(x, i) for x in operands[last:]]
      out = iterations.evaluate(equation, [*operands[:first], *carry, *rows], i, length, own)
      carry = out[:n]
      for j, value in enumerate(out[n:], n):
        blames[j] |= value.blame
    blames[:n] = [value.blame for value in carry]
    return self._looped(equation, operands, arrays, blames, place)

  def _while(self, equation: JaxprEqn, operands: list[BlamedArray], place: Place) -> list[BlamedArray]:
    arrays = _bind(equation, [x.array for x in operands])
    if all(map(is_finite, arrays)):
      return [BlamedArray(array) for array in arrays]
    layout, of_loss = call_layout(equation), (any(place.of_loss),) * len(arrays)
    condition, body = layout.bodies
    iterations = _Iterations(self, body.jaxpr, dataclasses.replace(place, of_loss=of_loss))
    goes_on = jax.jit(as_function(condition.jaxpr))
    values, i = list(operands), 0
    while i < _MOST_ITERATIONS:
      rows = goes_on(*(values[k].array for k in condition.operands))[0]  # one for each row under `vmap`
      if not jnp.any(rows):
        break
      before = values[layout.carry.start :]
      after = iterations.evaluate(equation, [values[k] for k in body.operands], i, None)
      if rows.ndim:
        merged = where_rows(rows, [x.array for x in after], [x.array for x in before])
        blames = [new.blame | old.blame for new, old in zip(after, before, strict=True)]
        after = [
          BlamedArray(x, _FINITE if is_finite(x) else blame) for x, blame in zip(merged, blames, strict=True)
        ]
      values[layout.carry.start :] = after
      i += 1
    return self._looped(equation, operands, arrays, [values[k].blame for k in layout.carry], place)

  def _looped(
    self,
    equation: JaxprEqn,
    operands: list[BlamedArray],
    arrays: list[Array],
    blames: list[Blame],
    place: Place,
  ) -> list[BlamedArray]:
    """Returns the results of a loop, with the blame on the loop itself if no iteration explains them."""
    new: Blame = _FINITE
    values = []
    for array, blame in zip(arrays, blames, strict=True):
      if is_finite(array):
        values.append(BlamedArray(array))
        continue
      if not blame and not new:
        new = frozenset({self._new(equation, operands, array, place, False, whole=True)})
      values.append(BlamedArray(array, self._shortened(blame or new)))
    return values


class _Iterations:
  """The iterations of a loop: each runs compiled, then operation by operation if a result is non-finite."""

  def __init__(self, evaluation: Evaluation, body: AnyJaxpr, place: Place):
    self._evaluation = evaluation
    self._body = body
    self._place = place
    self._compiled = jax.jit(as_function(body))
    self._left = _MOST_TAKEN_APART

  def evaluate(
    self,
    equation: JaxprEqn,
    operands: list[BlamedArray],
    i: int,
    length: int | None,
    micro_batch: bool = False,
  ) -> list[BlamedArray]:
    """Evaluates one iteration."""
    evaluation = self._evaluation
    arrays = self._compiled(*(x.array for x in operands))
    finite = [is_finite(array) for array in arrays]
    if all(finite):
      return [BlamedArray(array) for array in arrays]
    inherited = frozenset().union(*(x.blame for x in operands))
    if inherited:
      if not self._left:
        blame = evaluation._shortened(inherited)
        return [BlamedArray(x, _FINITE if ok else blame) for x, ok in zip(arrays, finite, strict=True)]
      self._left -= 1
    place = self._place.in_iteration(i, length, micro_batch)
    apart = evaluation._body(self._body, list(operands), place)
    new: Blame = _FINITE
    for j, (array, ok) in enumerate(zip(arrays, finite, strict=True)):
      if ok or apart[j].blame:
        continue
      if not new:
        new = frozenset({evaluation._new(equation, operands, array, place, False, whole=True)})
      apart[j] = BlamedArray(array, new)
    return apart


def _bind(equation: JaxprEqn, operands: list[Array]) -> list[Array]:
  if call_kind(equation) is CallKind.SHARD_MAP:
    return jax.jit(lambda *operands: _compat.bind(equation, list(operands)))(*operands)
  return _compat.bind(equation, operands)


def _origin(
  equation: JaxprEqn | None, operands: list[Array], array: Array, place: Place, whole: bool = False
) -> Origin:
  floating = [x for x in operands if is_inexact(x)]
  wide = (
    None if equation is None or whole or not operands else float32_largest(equation, operands, array.dtype)
  )
  return Origin(
    "constant" if equation is None else equation.primitive.name,
    place.module,
    place.line,
    not place.of_optimizer and (place.transposed or not any(place.of_loss)),
    place.iterations,
    jnp.result_type(array).name,
    np.shape(array),
    count(array),
    tuple(map(describe, floating)),
    wide,
    whole,
    of_optimizer=place.of_optimizer,
  )


@jax.jit
def _row(x: jax.Array, i: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _row_of(x: BlamedArray, i: int) -> BlamedArray:
  row = _row(x.array, np.int32(i))
  return BlamedArray(row, x.blame if x.blame and not is_finite(row) else _FINITE, x.constant)


def _without_infinities(x: Array) -> Array:
  return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


_Rule: TypeAlias = Callable[[Evaluation, JaxprEqn, list[BlamedArray], Place], list[BlamedArray]]


# How to evaluate an equation, by its kind of call; a kind that runs its body elsewhere is one operation.
_RULES: dict[CallKind | None, _Rule] = dict.fromkeys((None, *CallKind), Evaluation._operation)
_RULES |= {kind: Evaluation._call for kind in CallKind if kind.runs_once}
_RULES |= {
  CallKind.COND: Evaluation._cond,
  CallKind.SCAN: Evaluation._scan,
  CallKind.WHILE: Evaluation._while,
}
