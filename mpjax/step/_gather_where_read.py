"""Parameters gathered where a program reads them, and again in its backward pass.

The program of a loss function is evaluated again with a device's parts instead of whole parameters. A value
computed only from parameters is delayed: it holds the parts, and an equation that reads it with other values
gathers the parameters and frees them (`_read`), except for rows of a table (`_look_up`). Gradients are
divided into parts where they are computed.

Loops gather slices in their bodies, and loop invariants once before them. In a conditional no device may wait
for another, so what its branches read is gathered before it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import AnyJaxpr, Array, JaxprEqn, PyTree
from mpjax.jaxpr import (
  CallKind,
  Trait,
  as_traced,
  bind_again,
  bodies_of,
  call_kind,
  has,
  interpret,
  is_variable,
  outputs_of,
  scan_parts,
  shape_of,
)
from mpjax.products import InFp8, multiply_codes, takes_codes
from mpjax.step._collectives import Part, value_of

_ROWS = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
# A device's part of a parameter, and the scale, f32[], of one that crosses in FP8.
_Shard: TypeAlias = tuple[Array, Array | None]
# (gathered parameters, results of equations so far) -> a value.
_Make: TypeAlias = Callable[[Mapping[Part, Any], dict[int, list[Array]]], Array]


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["shards"], meta_fields=["make", "parts", "casts"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class _Delayed:
  """A value that is computed from divided parameters alone; for JAX a tree of their parts.

  Attributes:
    make: computes it: a parameter, a cast, a transpose, a norm, a normalised weight.
    parts: the division of each parameter; no two values that `_divided` makes have the same object.
    casts: the equations that cast a parameter to it; `None` for what is more than a parameter.
    shards: the device's part of each.
  """

  make: _Make
  parts: tuple[Part, ...]
  casts: tuple[JaxprEqn, ...] | None
  shards: list[_Shard]


_Value: TypeAlias = Array | _Delayed


def _divided(part: Part, shard: _Shard, casts: Iterable[JaxprEqn] = ()) -> _Delayed:
  """Returns a parameter of which a device has this part, cast by some equations."""
  part = dataclasses.replace(part)  # no two are equal
  x = _Delayed(lambda gathered, _: value_of(gathered[part]), (part,), (), [shard])
  for equation in casts:
    (x,) = _delay(equation, [x])
  return x


def _delay(equation: JaxprEqn, operands: Sequence[Any]) -> list[_Delayed]:
  """Returns the results of an equation on delayed values and literals, delayed."""
  shards, first = _shards_of(operands), operands[0]
  makes: list[_Make] = [x.make if isinstance(x, _Delayed) else (lambda *_, x=x: x) for x in operands]
  is_cast = equation.primitive is jax.lax.convert_element_type_p and first.casts is not None
  casts = (*first.casts, equation) if is_cast else None

  def make(i: int, gathered: Mapping[Part, Any], made: dict[int, list[Array]]) -> Array:
    if id(makes) not in made:
      made[id(makes)] = bind_again(equation, [of(gathered, made) for of in makes])
    return made[id(makes)][i]

  each = (functools.partial(make, i) for i in range(len(equation.outvars)))
  return [_Delayed(of, tuple(shards), casts, list(shards.values())) for of in each]


def _shards_of(values: Iterable[Any]) -> dict[Part, _Shard]:
  """Returns the parameters that values are computed from, each once, and the device's part of each."""
  delayed = [x for x in values if isinstance(x, _Delayed)]
  return {part: shard for x in delayed for part, shard in zip(x.parts, x.shards, strict=True)}


def _parameter_of(x: Any) -> tuple[Part, _Shard, tuple[JaxprEqn, ...]] | None:
  """Returns the division and part of the parameter that a value is, and what casts it, or `None`."""
  is_parameter = isinstance(x, _Delayed) and x.casts is not None
  return (x.parts[0], x.shards[0], x.casts) if is_parameter else None


def gather_where_read(
  fun: Callable[..., PyTree], parts: Sequence[Part | None], scales: Sequence[Array | None] | None = None
) -> Callable[..., PyTree]:
  """Returns a function of a device's parts of parameters that computes `fun` of the whole ones.

  `fun` takes a tree of parameters first, and then trees of arrays. `parts` are the division of each
  parameter, `None` for a whole one. `scales` are those, f32[], of parameters that cross in FP8.
  """
  scales = [None] * len(parts) if scales is None else scales

  def of_parts(params: PyTree, *args: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(params)
    rows = list(zip(leaves, parts, scales, strict=True))
    shapes = [x if part is None else part.whole_type(x) for x, part, _ in rows]
    closed, out = jax.make_jaxpr(fun, return_shape=True)(jax.tree.unflatten(structure, shapes), *args)
    values = [x if part is None else _divided(part, (x, scale)) for x, part, scale in rows]
    results = _evaluate(closed, [*values, *jax.tree.leaves(args)], fenced=True)
    return jax.tree.unflatten(jax.tree.structure(out), results)

  return of_parts


def _evaluate(jaxpr: AnyJaxpr, inputs: Sequence[_Value], fenced: bool) -> list[Array]:
  """Returns the outputs of a program, none delayed; `fenced` as in `_read`."""
  return _arrays(interpret(jaxpr, inputs, functools.partial(_apply, fenced)), fenced)


def _arrays(values: Sequence[_Value], fenced: bool) -> list[Array]:
  """Returns values, each read by itself if it is delayed."""
  return [_read(lambda x: [x], [x], fenced)[0] for x in values]


def _apply(fenced: bool, equation: JaxprEqn, operands: Sequence[_Value]) -> Sequence[_Value]:
  """Returns the results of an equation; `fenced` as in `_read`."""
  if not any(isinstance(x, _Delayed) for x in operands):
    return bind_again(equation, list(operands))
  kind = call_kind(equation)
  if kind in (CallKind.JIT, CallKind.INLINE):
    with as_traced(equation):
      return interpret(bodies_of(equation)[0], operands, functools.partial(_apply, fenced))
  if kind is CallKind.REMAT:
    return _remat(fenced, equation, operands)
  if kind is CallKind.SCAN:
    return _scan(fenced, equation, operands)
  is_each = has(equation, Trait.EACH) and has(equation, Trait.ALIAS)
  if kind is None and is_each and len(operands) == len(equation.outvars):
    return operands  # a barrier or a similar equation, which only concerns the compiler
  if found := _of_parts(equation, operands):
    return found
  of_parameters = all(
    isinstance(x, _Delayed) or not is_variable(a) for a, x in zip(equation.invars, operands, strict=True)
  )
  can_wait = (kind is None or kind.is_custom_rule) and not has(equation, Trait.PRODUCT)
  if of_parameters and can_wait and not equation.effects:
    if not _joins_small(equation, operands):
      return _delay(equation, operands)
    return bind_again(equation, _arrays(operands, fenced))
  with as_traced(equation):
    in_fp8 = [i for i, x in enumerate(operands) if _crosses_in_codes(equation, i, x)]
    if not in_fp8:
      return _read(lambda *xs: _compat.bind(equation, list(xs)), operands, fenced)

    def multiply(*xs: Array | InFp8) -> list[Array]:
      with _compat.context_of(equation):
        return [multiply_codes(equation, xs)]

    return _read(multiply, operands, fenced, in_fp8)


def _joins_small(equation: JaxprEqn, operands: Sequence[_Value]) -> bool:
  """Returns whether an equation makes several parameters one that is smaller than each, as a sum of squares.

  If its results were delayed, all those parameters would be gathered at once.
  """
  shards = _shards_of(operands).values()
  size = sum(math.prod(shape_of(v)) for v in equation.outvars)
  return len(shards) > 1 and size < min(shard.size for shard, _ in shards)


def _crosses_in_codes(equation: JaxprEqn, i: int, x: _Value) -> bool:
  """Returns whether an equation multiplies a parameter's FP8 numbers as they cross."""
  found = _parameter_of(x)
  scale = None if found is None else found[1][1]
  return found is not None and scale is not None and takes_codes(equation, i, found[0].gather_dtype)


def _of_parts(equation: JaxprEqn, operands: Sequence[_Value]) -> list[Array] | list[_Delayed] | None:
  """Returns the results of an equation that a device computes from its part of a parameter, or `None`."""
  found = _parameter_of(operands[0])
  indices = [x for x in operands[1:] if not isinstance(x, _Delayed)]
  if found is None or len(indices) < len(operands) - 1:
    return None
  part, (shard, scale), casts = found
  with as_traced(equation):
    if _looks_up_rows(equation, part):
      rows = [_look_up(equation, part, shard, indices[0])]
      return functools.reduce(lambda rows, cast: bind_again(cast, rows), casts, rows)
    if equation.primitive is jax.lax.squeeze_p:
      dimensions = equation.params["dimensions"]
      return [_divided(part.without(dimensions), (jax.lax.squeeze(shard, dimensions), scale), casts)]
    cut = _slice(equation, part.dimension, shard, indices)
  return None if cut is None else [_divided(part, (cut, scale), casts)]


def _slice(equation: JaxprEqn, dim: int, shard: Array, indices: Sequence[Array]) -> Array | None:
  """Returns a slice of a part, for an equation that slices the parameter and keeps the divided dimension."""
  p, out = equation.params, list(shape_of(equation.outvars[0]))
  is_slice = equation.primitive in (jax.lax.slice_p, jax.lax.dynamic_slice_p)
  if not is_slice or out[dim] != shape_of(equation.invars[0])[dim]:
    return None
  out[dim] = shard.shape[dim]
  if equation.primitive is jax.lax.dynamic_slice_p:
    return jax.lax.dynamic_slice(shard, list(indices), out)
  limits = [*p["limit_indices"][:dim], shard.shape[dim], *p["limit_indices"][dim + 1 :]]
  return jax.lax.slice(shard, p["start_indices"], limits, p["strides"])


def _remat(fenced: bool, equation: JaxprEqn, operands: Sequence[_Value]) -> list[Array]:
  body, p = bodies_of(equation)[0], equation.params
  fences = p["prevent_cse"]
  # A region that is recomputed as a whole may share gathered parameters with the backward pass behind it.
  apart = p["policy"] is None and (fences if isinstance(fences, bool) else any(fences))
  run = lambda *inputs: _evaluate(body, inputs, fenced and not apart)
  if not isinstance(fences, bool):  # one for each operand
    fences = tuple(f or isinstance(x, _Delayed) for f, x in zip(fences, operands, strict=True))
  with as_traced(equation):
    return jax.checkpoint(run, policy=p["policy"], prevent_cse=fences)(*operands)


def _scan(fenced: bool, equation: JaxprEqn, operands: Sequence[_Value]) -> list[Array]:
  consts, carry, options = scan_parts(equation)
  first = consts + carry
  found = {i: _parameter_of(x) for i, x in enumerate(operands) if i >= first}
  # A parameter that is divided over the layers themselves is gathered whole.
  inside = {i: row for i, row in found.items() if row is not None and row[0].dimension > 0}

  def run(*arrays: PyTree) -> list[Array]:
    xs = [x[0] if first + i in inside else x for i, x in enumerate(arrays[first:])]

    def step(carried: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
      inputs: list[Any] = [*arrays[:consts], *carried, *xs]
      for i, (part, _, casts) in inside.items():
        inputs[i] = _divided(part.without((0,)), (inputs[i], arrays[i][1]), casts)
      out = _evaluate(equation.params["jaxpr"], inputs, fenced=False)  # the backward pass is another loop
      return out[:carry], out[carry:]

    with as_traced(equation):
      carried, ys = jax.lax.scan(step, list(arrays[consts:first]), xs, **options)
    return [*carried, *ys]

  return _read(run, [inside[i][1] if i in inside else x for i, x in enumerate(operands)], fenced)


def _looks_up_rows(equation: JaxprEqn, part: Part) -> bool:
  """Returns whether an equation reads rows of a table divided along its rows, and fewer than it has."""
  if equation.primitive is not jax.lax.gather_p or part.dimension != 1 or "tensor" in part.spec:
    return False
  table, indices = map(shape_of, equation.invars[:2])
  dims = equation.params["dimension_numbers"]
  is_lookup = dims == _ROWS._replace(offset_dims=(len(indices) - 1,))
  return is_lookup and equation.params["slice_sizes"] == (1, table[1]) and math.prod(indices) < table[0]


def _look_up(equation: JaxprEqn, part: Part, shard: Array, indices: Array) -> Array:
  """Returns rows of a table of which each device has some columns, where `_looks_up_rows`. Inside `on_each`.

  Each device looks up the rows of all devices in its columns, and sends each device its own: the result of
  one device with the whole table. The gradient goes the same way back, and is summed in float32 at the
  columns.
  """
  lead = shape_of(equation.outvars[0])[:-1]

  def rows_of(every: Array, columns: Array) -> Array:
    slices = {"dimension_numbers": _ROWS, "slice_sizes": (1, columns.shape[1])}
    return _compat.bind(equation, [columns, every], **slices)[0]

  @jax.custom_vjp
  def run(shard: Array, indices: Array) -> Array:
    return forward(shard, indices)[0]

  def forward(shard: Array, indices: Array) -> tuple[Array, tuple[Array, Array]]:
    every = jax.lax.all_gather(indices.reshape(-1, 1), "fsdp", axis=0, tiled=True)
    rows = rows_of(every, shard.astype(part.gather_dtype))
    own = jax.lax.all_to_all(rows, "fsdp", split_axis=0, concat_axis=1, tiled=True)
    return own.astype(part.dtype).reshape(*lead, own.shape[1]), (every, shard)

  def backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    every, shard = saved
    cotangent = cotangent.reshape(-1, cotangent.shape[-1]).astype(shard.dtype)
    of_rows = jax.lax.all_to_all(cotangent, "fsdp", split_axis=1, concat_axis=0, tiled=True)
    (gradient,) = jax.vjp(functools.partial(rows_of, every), jnp.zeros_like(shard))[1](of_rows)
    return gradient, None

  run.defvjp(forward, backward)
  return run(shard, indices)


def _read(
  fun: Callable[..., list[Array]], operands: Sequence[PyTree], fenced: bool, in_fp8: Collection[int] = ()
) -> list[Array]:
  """Returns the results of a function for values of which some are delayed.

  Args:
    fun: takes as many arrays.
    operands: the values; also trees of arrays.
    fenced: whether a barrier must keep the backward pass from using what the forward pass gathered.
    in_fp8: positions of operands that are parameters which cross in FP8, for which `fun` takes an `InFp8`.
  """
  found = _shards_of(operands)
  if not found:
    return fun(*operands)
  parts, in_codes = list(found), {i: operands[i].parts[0] for i in in_fp8}
  makes = [x.make if isinstance(x, _Delayed) else None for x in operands]

  def of_gathered(gathered: Sequence[Any], others: Sequence[PyTree]) -> list[Array]:
    crossed, given = dict(zip(parts, gathered, strict=True)), iter(others)
    made: dict[int, list[Array]] = {}
    inputs = [next(given) if make is None else make(crossed, made) for make in makes]
    for i, part in in_codes.items():
      inputs[i] = crossed[part]._replace(value=inputs[i])
    return fun(*inputs)

  def gather(shards: Sequence[_Shard]) -> list[Array | InFp8]:
    return [part.gather(*shard) for part, shard in zip(parts, shards, strict=True)]

  @jax.custom_vjp
  def run(shards: Sequence[_Shard], others: Sequence[PyTree]) -> list[Array]:
    return of_gathered(gather(shards), others)

  def forward(shards: Sequence[_Shard], others: Sequence[PyTree]) -> tuple[list[Array], PyTree]:
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
  return run(list(found.values()), [x for x in operands if not isinstance(x, _Delayed)])


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
