"""Values of a program that are computed from divided parameters, and functions that read them.

A function that reads one gathers the parameters, and frees them: the backward pass recomputes what it needs
from a device's parts. Gradients are divided into parts where they are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._types import Array, ClosedJaxpr, JaxprEqn, PyTree, Var
from mpjax.jaxpr import bind_again, is_variable, live, variables_of
from mpjax.products import InFp8
from mpjax.step._collectives import Part


@dataclasses.dataclass(frozen=True)
class Divided:
  """A parameter in a program's values, of which a device has a part.

  It holds no array: a function that is traced later may hold it.

  Attributes:
    number: the number of the part in the `Scope`.
    part: its division, and the dtypes in which it crosses.
    casts: the equations that cast the whole parameter to this value.
  """

  number: int
  part: Part
  casts: tuple[JaxprEqn, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
  """A value that is computed only from divided parameters: a transpose, a norm, a normalised weight.

  Attributes:
    equation: computes it.
    operands: the operands of the equation; one tuple for all its results.
    index: the index of the result.
    roots: the parameters that it is computed from, by their numbers.
  """

  equation: JaxprEqn
  operands: tuple[Value, ...]
  index: int
  roots: Mapping[int, Divided]


Value = Array | Divided | Made
# A device's part of a parameter, and the scale, f32[], of one that crosses in FP8.
Shard = tuple[Array, Array | None]


@dataclasses.dataclass(frozen=True)
class Scope:
  """The place in a program where values are evaluated.

  Attributes:
    shards: the device's parts of the parameters in its values, by their numbers.
    fenced: whether a barrier must keep the backward pass from using what the forward pass gathered.
  """

  shards: dict[int, Shard]
  fenced: bool

  def add(self, part: Part, shard: Array, scale: Array | None = None) -> Divided:
    """Returns a parameter with this part."""
    number = max(self.shards, default=-1) + 1
    self.shards[number] = shard, scale
    return Divided(number, part)

  def narrow(self, x: Divided, part: Part, shard: Array) -> Divided:
    """Returns a slice of a parameter, from a slice of its part."""
    return dataclasses.replace(self.add(part, shard, self.shards[x.number][1]), casts=x.casts)


def is_put_off(x: Value) -> bool:
  """Returns whether a value is computed only from divided parameters, and so delayed until it is read."""
  return isinstance(x, (Divided, Made))


def results_of(equation: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
  """Returns the delayed results of an equation on divided parameters only."""
  own, roots = tuple(operands), roots_of(operands)
  return [Made(equation, own, i, roots) for i in range(len(equation.outvars))]


def roots_of(values: Sequence[Value]) -> dict[int, Divided]:
  """Returns the parameters that values are computed from, by their numbers."""
  found: dict[int, Divided] = {}
  for x in values:
    if isinstance(x, Made):
      found |= x.roots
    elif isinstance(x, Divided):
      found[x.number] = x
  return found


# Whole parameters as they crossed, and their scales.
_Crossed = Sequence[tuple[Array, Array | None]]


class _Whole:
  """The values that are computed from parameters, once those are gathered.

  Args:
    gathered: whole parameters, by their numbers.
  """

  def __init__(self, gathered: Mapping[int, Array]):
    self._gathered = gathered
    self._made: dict[int, list[Array]] = {}

  def __call__(self, x: Divided | Made) -> Array:
    """Returns a value."""
    if isinstance(x, Divided):
      cast = lambda value, equation: bind_again(equation, [value])[0]
      return functools.reduce(cast, x.casts, self._gathered[x.number])
    key = id(x.operands)
    if key not in self._made:
      operands = [self(a) if isinstance(a, (Divided, Made)) else a for a in x.operands]
      self._made[key] = bind_again(x.equation, operands)
    return self._made[key][x.index]


def read(
  fun: Callable[..., list[Array]], operands: Sequence[Value], scope: Scope, in_fp8: Collection[int] = ()
) -> list[Array]:
  """Returns the results of a function for values of which some are delayed.

  Residuals of its derivative that depend only on gathered parameters are recomputed from the parts.

  Args:
    fun: takes as many arrays.
    operands: the values.
    scope: the scope of the values.
    in_fp8: positions of operands that are parameters which cross in FP8, for which `fun` takes an `InFp8`.
  """
  roots = roots_of(operands)
  if not roots:
    return fun(*operands)
  # Several values may come from one parameter, which is gathered once.
  order, parts = list(roots), [x.part for x in roots.values()]
  templates = [x if isinstance(x, (Divided, Made)) else None for x in operands]
  fenced = scope.fenced

  def of_whole(gathered: Sequence[Array], crossed: _Crossed, others: Sequence[Array]) -> list[Array]:
    given, whole = iter(others), _Whole(dict(zip(order, gathered, strict=True)))

    def operand(i: int, x: Divided | Made | None) -> Array | InFp8:
      if x is None:
        return next(given)
      if i in in_fp8 and isinstance(x, Divided):
        codes, scale = crossed[order.index(x.number)]
        assert scale is not None
        return InFp8(whole(x), codes, scale)
      return whole(x)

    return fun(*(operand(i, x) for i, x in enumerate(templates)))

  def gather(shards: Sequence[Shard]) -> tuple[list[Array], _Crossed]:
    found = [part.gather(*shard) for shard, part in zip(shards, parts, strict=True)]
    return [x for x, _ in found], [(codes, s) for (_, codes), (_, s) in zip(found, shards, strict=True)]

  @jax.custom_vjp
  def run(shards: Sequence[Shard], others: Sequence[Array]) -> list[Array]:
    return of_whole(*gather(shards), others)

  def forward(shards: Sequence[Shard], others: Sequence[Array]) -> tuple[list[Array], PyTree]:
    gathered, crossed = gather(shards)
    residuals = _Residuals(of_whole, gathered, crossed, others)
    out, saved = residuals.forward(gathered, crossed, others)
    return out, (residuals, saved, shards)

  def backward(saved: PyTree, cotangents: list[Array]) -> tuple[list[tuple[Array, None]], list[Array | None]]:
    residuals, arrays, shards = saved
    if fenced:
      shards, cotangents = jax.lax.optimization_barrier((shards, cotangents))
    of_gathered, of_others = residuals.backward(lambda: gather(shards), arrays, cotangents)
    back = zip(of_gathered, shards, parts, strict=True)
    return [(part.reduce(ct, x.dtype), None) for ct, (x, _), part in back], of_others

  run.defvjp(forward, backward)
  return run([scope.shards[number] for number in order], [x for x in operands if not is_put_off(x)])


@jax.tree_util.register_static
class _Residuals:
  """A function of gathered parameters and other arrays, and the residuals of its derivative.

  Args:
    fun: takes three trees of arrays.
    gathered: the first, with arrays of these types.
    crossed: the second, which is not differentiated.
    others: the third.
  """

  def __init__(
    self,
    fun: Callable[[Sequence[Array], _Crossed, Sequence[Array]], list[Array]],
    gathered: Sequence[Array],
    crossed: _Crossed,
    others: Sequence[Array],
  ):
    moves = self._moves = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in others]

    def run(
      gathered: Sequence[Array], crossed: _Crossed, others: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
      def of_moving(gathered: Sequence[Array], moving: Sequence[Array]) -> list[Array]:
        given = iter(moving)
        return fun(gathered, crossed, [next(given) if m else x for x, m in zip(others, moves, strict=True)])

      moving = [x for x, m in zip(others, moves, strict=True) if m]
      out, pull = jax.vjp(of_moving, gathered, moving)
      residuals, self._structure = jax.tree.flatten(pull)
      self._results = len(out)
      return out, residuals

    self._closed: ClosedJaxpr = jax.make_jaxpr(run)(gathered, crossed, others)
    body = self._closed.jaxpr
    mixed = set(body.invars[len(body.invars) - len(others) :])
    for equation in body.eqns:
      if not mixed.isdisjoint(variables_of(equation.invars)):
        mixed.update(equation.outvars)
    self._is_kept = [is_variable(a) and a in mixed for a in body.outvars[self._results :]]
    self._is_again = [False] * self._results + [not kept for kept in self._is_kept]
    read = live(body, self._is_again, effects=False).variables
    self._gathers_again = not read.isdisjoint(body.invars)

  def forward(
    self, gathered: Sequence[Array], crossed: _Crossed, others: Sequence[Array]
  ) -> tuple[list[Array], list[Array]]:
    """Returns the results, and the residuals that depend on other arrays than gathered ones."""
    arguments = [*gathered, *jax.tree.leaves(crossed), *others]
    out = _outputs(self._closed, arguments, [True] * self._results + self._is_kept, effects=True)
    return out[: self._results], out[self._results :]

  def backward(
    self,
    gather: Callable[[], tuple[list[Array], _Crossed]],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
  ) -> tuple[list[Array], list[Array | None]]:
    """Returns cotangents of the gathered parameters and of the others; `gather` gathers the first again."""
    known: list[Array] = []
    if self._gathers_again:
      gathered, crossed = gather()
      known = [*gathered, *jax.tree.leaves(crossed)]
    unread = (None,) * (len(self._closed.jaxpr.invars) - len(known))
    again = iter(_outputs(self._closed, [*known, *unread], self._is_again))
    stored = iter(saved)
    residuals = [next(stored) if is_kept else next(again) for is_kept in self._is_kept]
    of_gathered, of_moving = jax.tree.unflatten(self._structure, residuals)(list(cotangents))
    given = iter(of_moving)
    return of_gathered, [next(given) if m else None for m in self._moves]


def _outputs(
  closed: ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[bool], *, effects: bool = False
) -> list[Array]:
  """Returns some outputs of a program, from the arguments that they need; with its effects if asked."""
  body = closed.jaxpr
  values: dict[Var, Any] = dict(zip(body.constvars, closed.consts, strict=True))
  values |= zip(body.invars, arguments, strict=True)
  for equation in live(body, wanted, effects=effects).equations:
    operands = [values[a] if is_variable(a) else a.val for a in equation.invars]
    values |= zip(equation.outvars, bind_again(equation, operands), strict=True)
  outs = zip(body.outvars, wanted, strict=True)
  return [values[a] if is_variable(a) else a.val for a, is_wanted in outs if is_wanted]
