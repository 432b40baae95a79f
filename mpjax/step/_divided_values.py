"""Values that are computed from divided parameters alone, and functions that read them.

Such a value is delayed: it holds a device's parts of the parameters, and is computed where a function reads
it. The function gathers the parameters and frees them; the backward pass makes what it needs from the parts
again. Gradients are divided into parts where they are computed.
"""

from __future__ import annotations

import dataclasses
import functools
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
class Parameter:
  """A divided parameter, or a slice of one; two of them are never equal.

  Attributes:
    part: its division, and the dtypes in which it crosses.
  """

  part: Part


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
  """The origin of a value that is a parameter.

  Attributes:
    parameter: the parameter.
    casts: the equations that cast it to the value.
  """

  parameter: Parameter
  casts: tuple[JaxprEqn, ...] = ()

  @property
  def part(self) -> Part:
    """The division of the parameter."""
    return self.parameter.part

  def cast(self, x: Array) -> Array:
    """Returns the value, from the parameter or some of its rows."""
    return functools.reduce(lambda x, equation: bind_again(equation, [x])[0], self.casts, x)


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
  """The origin of a value that is computed from parameters: a transpose, a norm, a normalised weight.

  Attributes:
    equation: computes it.
    operands: origins and literals; one tuple for all results of the equation.
    index: the index of the result.
  """

  equation: JaxprEqn
  operands: tuple[Any, ...]
  index: int


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["shards"], meta_fields=["origin", "parameters"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class Delayed:
  """A value that is computed from divided parameters alone; for JAX a tree of their parts.

  Attributes:
    origin: how it is computed from whole parameters.
    parameters: the parameters.
    shards: the device's part of each.
  """

  origin: Divided | Made
  parameters: tuple[Parameter, ...]
  shards: list[Shard]


Value: TypeAlias = Array | Delayed


def divided(part: Part, shard: Shard, casts: tuple[JaxprEqn, ...] = ()) -> Delayed:
  """Returns a parameter of which a device has this part."""
  parameter = Parameter(part)
  return Delayed(Divided(parameter, casts), (parameter,), [shard])


def delay(equation: JaxprEqn, operands: Sequence[Any]) -> list[Delayed]:
  """Returns the results of an equation on delayed values and literals, delayed."""
  shards = shards_of(operands)
  origins = tuple(x.origin if isinstance(x, Delayed) else x for x in operands)
  made = (Made(equation, origins, i) for i in range(len(equation.outvars)))
  return [Delayed(origin, tuple(shards), list(shards.values())) for origin in made]


def shards_of(values: Iterable[Any]) -> dict[Parameter, Shard]:
  """Returns the parameters that values are computed from, each once, and the device's part of each."""
  delayed = [x for x in values if isinstance(x, Delayed)]
  return {key: shard for x in delayed for key, shard in zip(x.parameters, x.shards, strict=True)}


class _Whole:
  """The values that are computed from parameters, once those are gathered."""

  def __init__(self, gathered: Mapping[Parameter, Array | InFp8]):
    self._gathered = gathered
    self._made: dict[int, list[Array]] = {}

  def __call__(self, origin: Any) -> Array:
    """Returns the value of an origin; of a literal itself."""
    if isinstance(origin, Divided):
      return origin.cast(value_of(self._gathered[origin.parameter]))
    if not isinstance(origin, Made):
      return origin
    key = id(origin.operands)
    if key not in self._made:
      self._made[key] = bind_again(origin.equation, [self(x) for x in origin.operands])
    return self._made[key][origin.index]


def read(
  fun: Callable[..., list[Array]], operands: Sequence[PyTree], fenced: bool, in_fp8: Collection[int] = ()
) -> list[Array]:
  """Returns the results of a function for values of which some are delayed.

  Residuals of its derivative that depend only on gathered parameters are made again from the parts.

  Args:
    fun: takes as many arrays.
    operands: the values; also trees of arrays.
    fenced: whether a barrier must keep the backward pass from using what the forward pass gathered.
    in_fp8: positions of operands that are parameters which cross in FP8, for which `fun` takes an `InFp8`.
  """
  found = shards_of(operands)
  if not found:
    return fun(*operands)
  parameters, origins = list(found), [x.origin if isinstance(x, Delayed) else None for x in operands]

  def of_gathered(gathered: Sequence[Array | InFp8], others: Sequence[PyTree]) -> list[Array]:
    crossed, given = dict(zip(parameters, gathered, strict=True)), iter(others)
    whole = _Whole(crossed)
    inputs = [next(given) if origin is None else whole(origin) for origin in origins]
    for i in in_fp8:
      inputs[i] = crossed[origins[i].parameter]._replace(value=inputs[i])
    return fun(*inputs)

  def gather(shards: Sequence[Shard]) -> list[Array | InFp8]:
    return [key.part.gather(*shard) for key, shard in zip(parameters, shards, strict=True)]

  @jax.custom_vjp
  def run(shards: Sequence[Shard], others: Sequence[PyTree]) -> list[Array]:
    return of_gathered(gather(shards), others)

  def forward(shards: Sequence[Shard], others: Sequence[PyTree]) -> tuple[list[Array], PyTree]:
    gathered = gather(shards)
    derivative = _Derivative(of_gathered, gathered, others)
    out, saved = derivative.forward(gathered, others)
    return out, (derivative, saved, shards)

  def backward(kept: PyTree, cotangents: list[Array]) -> tuple[list[tuple[Array, None]], PyTree]:
    derivative, saved, shards = kept
    if fenced:
      shards, cotangents = jax.lax.optimization_barrier((shards, cotangents))
    gradients, of_others = derivative.backward(lambda: gather(shards), saved, cotangents)
    rows = zip(parameters, gradients, shards, strict=True)
    return [(key.part.reduce(value_of(g), x.dtype), None) for key, g, (x, _) in rows], of_others

  run.defvjp(forward, backward)
  return run(list(found.values()), [x for x in operands if not isinstance(x, Delayed)])


@jax.tree_util.register_static
class _Derivative:
  """The program of a function's results and of its derivative's residuals.

  Args:
    fun: a function of gathered parameters and of other arrays.
    gathered: the parameters.
    others: the others.
  """

  def __init__(self, fun: Callable[..., list[Array]], gathered: PyTree, others: PyTree):
    self._closed, shapes = jax.make_jaxpr(functools.partial(jax.vjp, fun), return_shape=True)(
      gathered, others
    )
    self._structure, self._results = jax.tree.structure(shapes), len(shapes[0])
    given, rest = ([flag] * len(jax.tree.leaves(x)) for flag, x in ((True, gathered), (False, others)))
    by_gathered = outputs_of(self._closed, [*given, *rest])
    by_others = outputs_of(self._closed, [not x for x in (*given, *rest)])
    self._is_saved = [i < self._results or by_other for i, by_other in enumerate(by_others)]
    self._gathers_again = any(by and not saved for by, saved in zip(by_gathered, self._is_saved, strict=True))

  def forward(self, gathered: PyTree, others: PyTree) -> tuple[list[Array], list[Array]]:
    """Returns the results, and the residuals that depend on other arrays than gathered ones."""
    out = interpret(self._closed, jax.tree.leaves((gathered, others)), bind_again, self._is_saved)
    return out[: self._results], out[self._results :]

  def backward(
    self, gather: Callable[[], PyTree], saved: Sequence[Array], cotangents: list[Array]
  ) -> tuple[PyTree, PyTree]:
    """Returns cotangents of the gathered parameters and of the others; `gather` gathers the first again."""
    known = jax.tree.leaves(gather()) if self._gathers_again else []
    given = [*known, *[None] * (len(self._closed.jaxpr.invars) - len(known))]
    is_made = [not x for x in self._is_saved]
    made = iter(interpret(self._closed, given, bind_again, is_made, effects=False))
    stored = iter([*cotangents, *saved])  # no results are needed
    leaves = [next(stored) if is_saved else next(made) for is_saved in self._is_saved]
    return jax.tree.unflatten(self._structure, leaves)[1](cotangents)
