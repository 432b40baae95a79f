"""Evaluates a traced program operation by operation, and records the origin of each non-finite value.

There are three kinds of non-finite values. A non-finite operand explains the first kind, which inherits its
origins. The second kind is new: its operation is an origin. The third kind is intended, such as an infinity
in the program or in a mask, until an operation turns it into NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import AnyJaxpr, Array, ClosedJaxpr, JaxprEqn
from mpjax.jaxpr import (
  CallKind,
  Facts,
  Trait,
  as_function,
  call_kind,
  call_layout,
  has,
  interpret,
  needed,
  where_rows,
)
from mpjax.loss_scale import NonFinite, is_inexact
from mpjax.numerics.nonfinite._origins import (
  Origin,
  Place,
  count,
  describe,
  float32_largest,
  is_finite,
  made_here,
  of_places,
)

# Enough to tell independent failures apart; after a divergence everywhere, thousands would say no more.
_MOST_ORIGINS = 64
# The most iterations of one loop that run operation by operation although their inputs are non-finite.
_MOST_TAKEN_APART = 16
_MOST_ITERATIONS = 10_000
# What casts, views and slices have: they compute nothing. A lookup of rows, which reads memory, is named.
_VIEWS = Trait.PASSES_ON | Trait.ALIAS | Trait.CAST
Blame = frozenset[int]
_FINITE: Blame = frozenset()


class BlamedArray(NamedTuple):
  """An array of the program, and the sources of its non-finite values.

  Attributes:
    array: its value.
    blame: indices into `Evaluation.sources`; empty for a finite array.
    constant: whether it is computed from the program's own scalars only.
  """

  array: Array
  blame: Blame = _FINITE
  constant: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
  """A source of non-finite values: an operation, or an input of the program.

  Attributes:
    origin: the operation; for an input, the first that computes with it, or `None` before that.
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

  def __init__(self, accumulate: int):
    self.sources: list[Source] = []
    self._accumulate = accumulate
    # The blame on a constant, by its id, and on an input, by its source, where an equation reads it.
    self._constants: dict[tuple[int, JaxprEqn | None], Blame] = {}
    self._reads: dict[tuple[int, JaxprEqn], Blame] = {}

  def run(
    self,
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Array, bool]],
    of_loss: Sequence[bool],
    place: Place,
  ) -> list[BlamedArray]:
    """Evaluates a program.

    Args:
      closed: a closed jaxpr.
      inputs: the name and array of each, and whether negative infinities in it are intended.
      of_loss: which of its results the loss depends on.
      place: the place of the program.
    """
    return self._body(closed, [self._input(*item) for item in inputs], place, needed(closed, of_loss))

  def _input(self, name: str, array: Array, may_mask: bool) -> BlamedArray:
    if is_finite(array):
      return BlamedArray(array)
    counts = count(array)
    meant = may_mask and not counts.nan and not counts.posinf
    return BlamedArray(array, self._add(Source(None, name, counts, meant)))

  def _add(self, source: Source) -> Blame:
    self.sources.append(source)
    return frozenset({len(self.sources) - 1})

  def _body(
    self, jaxpr: AnyJaxpr, values: list[Any], place: Place, of_loss: Facts[bool]
  ) -> list[BlamedArray]:
    """Evaluates a jaxpr; empties the list of values."""
    rule = functools.partial(self._equation, place, of_loss)
    results = interpret(jaxpr, _taken_from(values), rule, effects=False)
    return [self._value(x, None, place) for x in results]

  def _value(self, x: Any, equation: JaxprEqn | None, place: Place) -> BlamedArray:
    """Returns an operand with its blame; one without is a literal or a constant of the program."""
    if isinstance(x, BlamedArray):
      return x
    constant = np.ndim(x) == 0
    if is_finite(x):
      return BlamedArray(x, constant=constant)
    key = id(x), equation
    if key not in self._constants:
      origin = dataclasses.replace(_origin(equation, [], x, place), constant=True)
      self._constants[key] = self._add(Source(origin, meant=True))
    return BlamedArray(x, self._constants[key], constant)

  def _equation(
    self, place: Place, of_loss: Facts[bool], equation: JaxprEqn, operands: list[Any]
  ) -> list[BlamedArray]:
    """Evaluates an equation; a call that runs its body elsewhere is one operation."""
    place = place.at(equation, any(of_loss[v] for v in equation.outvars))
    kind, bodies = call_kind(equation), call_layout(equation).bodies
    entered = kind is not None and (kind.is_control_flow or kind.runs_once)
    i = len(bodies) - 1  # the only one, or the last: a `while` has its condition first
    if kind is CallKind.COND:
      chosen = self._value(operands.pop(0), equation, place).array
      i = min(max(int(chosen), 0), i)
    inside = of_loss.inside(equation, i) if entered else None
    if inside is None:
      return self._operation(equation, operands, place)
    if kind in (CallKind.SCAN, CallKind.WHILE):
      return self._loop(equation, operands, place, inside)
    return self._body(bodies[i].jaxpr, operands, place, inside)

  def _operation(self, equation: JaxprEqn, operands: list[Any], place: Place) -> list[BlamedArray]:
    values = [self._value(x, equation, place) for x in operands]
    arrays = _bind(equation, [x.array for x in values])
    constant = all(x.constant for x in values)
    each = has(equation, Trait.EACH) and len(values) == len(arrays)
    inherited = _blame_of(values)
    new = _FINITE
    results = []
    for i, array in enumerate(arrays):
      blame = _FINITE
      if not is_finite(array):
        blame = values[i].blame if each else inherited
        if self._is_new(equation, values, array, blame):
          new = new or self._new(equation, values, array, place)
          blame |= new
        blame = self._read(blame, equation, values, array, place)
      results.append(BlamedArray(array, blame, constant))
    return results

  def _is_new(self, equation: JaxprEqn, operands: list[BlamedArray], array: Array, blame: Blame) -> bool:
    """Returns whether the operands do not explain a non-finite result."""
    if not blame:
      return True
    if sum(not source.meant for source in self.sources) >= _MOST_ORIGINS:
      return False
    meant = all(self.sources[i].meant for i in blame)
    if meant and count(array).nan:
      return True
    floating = [x.array for x in operands if is_inexact(x.array)]
    if of_places(equation, floating, array.shape):
      return bool(made_here(array, floating))
    if meant and has(equation, Trait.ACCUMULATES):
      finite = [jnp.where(jnp.isfinite(x.array), x.array, 0) if x.blame else x.array for x in operands]
      return not all(is_finite(x) for x in _bind(equation, finite))
    return False

  def _new(
    self, equation: JaxprEqn, operands: list[BlamedArray], array: Array, place: Place, whole: bool = False
  ) -> Blame:
    """Returns the blame on an operation."""
    arrays = [x.array for x in operands]
    origin = _origin(equation, arrays, array, place)
    constant = all(x.constant for x in operands)
    # A NaN operand without an earlier fault is the program's own; it is never intended to spread.
    own = any(o.nonfinite.nan for o in origin.operands)
    own = constant or (own and all(self.sources[i].meant for i in _blame_of(operands)))
    wide = float32_largest(equation, arrays, array.dtype)
    origin = dataclasses.replace(origin, float32_largest=wide, whole=whole, constant=own)
    return self._add(Source(origin, meant=constant and not origin.nonfinite.nan))

  def _read(
    self, blame: Blame, equation: JaxprEqn, operands: list[BlamedArray], array: Array, place: Place
  ) -> Blame:
    """Returns the blame on a result, where this equation is the first to compute with an input."""
    if has(equation, _VIEWS) and not has(equation, Trait.READS_STORED):
      return blame
    for i in blame:
      if self.sources[i].origin is None:
        if (i, equation) not in self._reads:
          origin = _origin(equation, [x.array for x in operands], array, place)
          self._reads[i, equation] = self._add(dataclasses.replace(self.sources[i], origin=origin))
        blame = blame - {i} | self._reads[i, equation]
    return blame

  def _loop(
    self, equation: JaxprEqn, operands: list[Any], place: Place, of_loss: Facts[bool]
  ) -> list[BlamedArray]:
    """Evaluates a loop as a whole and, if a result is non-finite, iteration by iteration.

    Each iteration runs compiled, then operation by operation if a result is non-finite.
    """
    values = [self._value(x, equation, place) for x in operands]
    arrays = _bind(equation, [x.array for x in values])
    if all(map(is_finite, arrays)):
      return [BlamedArray(array) for array in arrays]
    layout, length = call_layout(equation), equation.params.get("length")
    *conditions, body = layout.bodies
    goes_on, run = (jax.jit(as_function(one.jaxpr)) for one in (layout.bodies[0], body))
    carry, n = slice(layout.carry.start, layout.carry.stop), len(layout.carry)
    outermost = not (place.of_optimizer or place.iterations or place.module)
    micro_batch = outermost and length == self._accumulate > 1
    blames, left = [_FINITE] * len(arrays), _MOST_TAKEN_APART
    order = range(_MOST_ITERATIONS if length is None else length)
    for i in reversed(order) if equation.params.get("reverse") else order:
      active = jnp.array(True)
      for condition in conditions:
        active = goes_on(*(values[k].array for k in condition.operands))[0]  # one for each row under `vmap`
      if not active.any():
        break
      rows = layout.rows or ()
      inputs = [_row_of(values[k], i) if k in rows else values[k] for k in body.operands]
      after = run(*(x.array for x in inputs))
      inherited = _blame_of(inputs)
      found = [inherited] * len(after)
      here = place.in_iteration(i, length, micro_batch)
      if not all(map(is_finite, after)) and (left or not inherited):
        left -= bool(inherited)
        found = [x.blame for x in self._body(body.jaxpr, list(inputs), here, of_loss)]
      out = self._explained(equation, inputs, after, found, here)
      values[carry] = _where(active, out[:n], values[carry])
      blames[n:] = [blame | x.blame for blame, x in zip(blames[n:], out[n:], strict=True)]
    blames[:n] = [x.blame for x in values[carry]]
    return self._explained(equation, values, arrays, blames, place)

  def _explained(
    self,
    equation: JaxprEqn,
    operands: list[BlamedArray],
    arrays: list[Array],
    blames: list[Blame],
    place: Place,
  ) -> list[BlamedArray]:
    """Returns results of a loop, with the blame on the loop itself if no operation in it explains them."""
    new = _FINITE
    results = []
    for array, blame in zip(arrays, blames, strict=True):
      if is_finite(array):
        blame = _FINITE
      elif not blame:
        blame = new = new or self._new(equation, operands, array, place, whole=True)
      results.append(BlamedArray(array, blame))
    return results


def _taken_from(values: list[Any]) -> Iterator[Any]:
  """Yields the values of a list, and empties it, so that each is freed after its last use."""
  values.reverse()
  while values:
    yield values.pop()


def _blame_of(values: Sequence[BlamedArray]) -> Blame:
  return _FINITE.union(*(x.blame for x in values))


def _bind(equation: JaxprEqn, operands: list[Array]) -> list[Array]:
  if call_kind(equation) is CallKind.SHARD_MAP:
    return jax.jit(lambda *operands: _compat.bind(equation, list(operands)))(*operands)
  return _compat.bind(equation, operands)


def _origin(equation: JaxprEqn | None, operands: list[Array], array: Array, place: Place) -> Origin:
  return Origin(
    **vars(place),
    primitive="constant" if equation is None else equation.primitive.name,
    dtype=jnp.result_type(array).name,
    shape=np.shape(array),
    nonfinite=count(array),
    operands=tuple(describe(x) for x in operands if is_inexact(x)),
  )


@jax.jit
def _row(x: jax.Array, i: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _row_of(x: BlamedArray, i: int) -> BlamedArray:
  row = _row(x.array, np.int32(i))
  return BlamedArray(row, x.blame if x.blame and not is_finite(row) else _FINITE, x.constant)


def _where(active: Array, new: list[BlamedArray], old: list[BlamedArray]) -> list[BlamedArray]:
  """Returns the new values, and the old ones in rows that are not active if there is a flag for each row."""
  if not np.ndim(active):
    return new
  arrays = where_rows(active, [x.array for x in new], [x.array for x in old])
  blames = [a.blame | b.blame for a, b in zip(new, old, strict=True)]
  return [BlamedArray(x, _FINITE if is_finite(x) else b) for x, b in zip(arrays, blames, strict=True)]
