"""Values that are computed from divided parameters alone, and functions that read them.

Such a value is delayed: it holds a device's parts of the parameters, and is computed where a function reads
it. The function gathers the parameters and frees them; the backward pass makes what it needs from the parts
again. Gradients are divided into parts where they are computed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from mpjax._types import Array, JaxprEqn, PyTree
from mpjax.jaxpr import bind_again, interpret, outputs_of
from mpjax.products import InFp8
from mpjax.step._collectives import Part, value_of

# A device's part of a parameter, and the scale, f32[], of one that crosses in FP8.
Shard: TypeAlias = tuple[Array, Array | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
  """How a value is computed from parameters: a cast, a transpose, a norm, a normalised weight.

  Attributes:
    equation: computes it.
    operands: parameters, other `Made` values and literals; one tuple for all results of the equation.
    index: the index of the result.
  """

  equation: JaxprEqn
  operands: tuple[Any, ...]
  index: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["shards"], meta_fields=["origin", "parts"])
@dataclasses.dataclass(frozen=True, eq=False)
class Delayed:
  """A value that is computed from divided parameters alone; for JAX a tree of their parts.

  Attributes:
    origin: the division of a parameter, or how it is computed from parameters.
    parts: the division of each parameter; no two values that `divided` makes have the same object.
    shards: the device's part of each.
  """

  origin: Part | Made
  parts: tuple[Part, ...]
  shards: list[Shard]


Value: TypeAlias = Array | Delayed


def divided(part: Part, shard: Shard, casts: Iterable[JaxprEqn] = ()) -> Delayed:
  """Returns a parameter of which a device has this part, cast by some equations."""
  part = dataclasses.replace(part)  # no two are equal
  x = Delayed(part, (part,), [shard])
  for equation in casts:
    (x,) = delay(equation, [x])
  return x


def delay(equation: JaxprEqn, operands: Sequence[Any]) -> list[Delayed]:
  """Returns the results of an equation on delayed values and literals, delayed."""
  shards = shards_of(operands)
  origins = tuple(x.origin if isinstance(x, Delayed) else x for x in operands)
  made = (Made(equation, origins, i) for i in range(len(equation.outvars)))
  return [Delayed(origin, tuple(shards), list(shards.values())) for origin in made]


def shards_of(values: Iterable[Any]) -> dict[Part, Shard]:
  """Returns the parameters that values are computed from, each once, and the device's part of each."""
  delayed = [x for x in values if isinstance(x, Delayed)]
  return {part: shard for x in delayed for part, shard in zip(x.parts, x.shards, strict=True)}


def parameter_of(x: Any) -> tuple[Part, Shard, list[JaxprEqn]] | None:
  """Returns the division and part of the parameter that a value is, and what casts it, or `None`."""
  origin, casts = x.origin if isinstance(x, Delayed) else None, []
  while isinstance(origin, Made) and origin.equation.primitive is jax.lax.convert_element_type_p:
    casts.append(origin.equation)
    (origin,) = origin.operands
  return (origin, x.shards[0], casts[::-1]) if isinstance(origin, Part) else None


def read(
  fun: Callable[..., list[Array]], operands: Sequence[PyTree], fenced: bool, in_fp8: Collection[int] = ()
) -> list[Array]:
  """Returns the results of a function for values of which some are delayed.

  Args:
    fun: takes as many arrays.
    operands: the values; also trees of arrays.
    fenced: whether a barrier must keep the backward pass from using what the forward pass gathered.
    in_fp8: positions of operands that are parameters which cross in FP8, for which `fun` takes an `InFp8`.
  """
  found = shards_of(operands)
  if not found:
    return fun(*operands)
  parts, in_codes = list(found), {i: operands[i].parts[0] for i in in_fp8}
  origins = [x.origin if isinstance(x, Delayed) else None for x in operands]

  def of_gathered(gathered: Sequence[Any], others: Sequence[PyTree]) -> list[Array]:
    crossed, given = dict(zip(parts, gathered, strict=True)), iter(others)
    made: dict[int, list[Array]] = {}
    inputs = [next(given) if origin is None else _whole(origin, crossed, made) for origin in origins]
    for i, part in in_codes.items():
      inputs[i] = crossed[part]._replace(value=inputs[i])
    return fun(*inputs)

  def gather(shards: Sequence[Shard]) -> list[Array | InFp8]:
    return [part.gather(*shard) for part, shard in zip(parts, shards, strict=True)]

  @jax.custom_vjp
  def run(shards: Sequence[Shard], others: Sequence[PyTree]) -> list[Array]:
    return of_gathered(gather(shards), others)

  def forward(shards: Sequence[Shard], others: Sequence[PyTree]) -> tuple[list[Array], PyTree]:
    out, derivative = _with_derivative(of_gathered, gather(shards), others)
    return out, (derivative, shards)

  def backward(kept: PyTree, cotangents: list[Array]) -> tuple[list[tuple[Array, None]], PyTree]:
    derivative, shards = kept
    if fenced:
      shards, cotangents = jax.lax.optimization_barrier((shards, cotangents))
    gradients, of_others = derivative(lambda: gather(shards), cotangents)
    rows = zip(parts, gradients, shards, strict=True)
    return [(part.reduce(value_of(g), x.dtype), None) for part, g, (x, _) in rows], of_others

  run.defvjp(forward, backward)
  return run(list(found.values()), [x for x in operands if not isinstance(x, Delayed)])


def _whole(origin: Any, gathered: Mapping[Part, Array | InFp8], made: dict[int, list[Array]]) -> Array:
  """Returns the value of an origin, from gathered parameters; `made` holds the results of equations."""
  if isinstance(origin, Part):
    return value_of(gathered[origin])
  if not isinstance(origin, Made):
    return origin  # a literal
  key = id(origin.operands)
  if key not in made:
    made[key] = bind_again(origin.equation, [_whole(x, gathered, made) for x in origin.operands])
  return made[key][origin.index]


def _with_derivative(
  fun: Callable[..., list[Array]], gathered: PyTree, others: PyTree
) -> tuple[list[Array], jax.tree_util.Partial]:
  """Returns the results of a function of gathered parameters and of other arrays, and its derivative.

  The derivative is a tree of the residuals that depend on the others. It takes a function that gathers the
  parameters again, which it calls if a residual depends on them alone, and the cotangents of the results.

  A policy of `jax.checkpoint` could not do this: it sees an equation's primitive, and not what it depends on.
  """
  closed, shapes = jax.make_jaxpr(functools.partial(jax.vjp, fun), return_shape=True)(gathered, others)
  n, m, results = (len(jax.tree.leaves(x)) for x in (gathered, others, shapes[0]))
  of_gathered = outputs_of(closed, [True] * n + [False] * m)
  of_others = outputs_of(closed, [False] * n + [True] * m)
  is_saved = [i < results or of_other for i, of_other in enumerate(of_others)]
  is_made = [not saved for saved in is_saved]
  out = interpret(closed, jax.tree.leaves((gathered, others)), bind_again, is_saved)

  def derivative(saved: list[Array], gather: Callable[[], PyTree], cotangents: list[Array]) -> PyTree:
    gathers = any(itertools.compress(of_gathered, is_made))
    known = jax.tree.leaves(gather()) if gathers else [None] * n
    made = iter(interpret(closed, [*known, *[None] * m], bind_again, is_made, effects=False))
    stored = iter([*cotangents, *saved])  # cotangents in the place of results, which are not needed
    leaves = [next(stored if saved else made) for saved in is_saved]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)[1](cotangents)

  return out[:results], jax.tree_util.Partial(derivative, out[results:])
