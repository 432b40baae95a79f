"""Parameters gathered where a program reads them, and again in its backward pass.

The program of a loss function is evaluated again with a device's parts instead of whole parameters. Values
computed only from parameters are delayed; an equation that reads one with other values gathers it (`read`),
except for rows of a table (`look_up`).

Loops gather slices in their bodies, and loop invariants once before them. In a conditional no device may wait
for another, so what its branches read is gathered before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

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
  scan_parts,
  shape_of,
)
from mpjax.products import InFp8, multiply_codes, takes_codes
from mpjax.step._collectives import Part
from mpjax.step._divided_values import Delayed, Value, delay, divided, parameter_of, read, shards_of
from mpjax.step._table_lookup import look_up, looks_up_rows


def gather_where_read(
  fun: Callable[..., PyTree], parts: Sequence[Part | None], scales: Sequence[Array | None] | None = None
) -> Callable[..., PyTree]:
  """Returns a function of a device's parts of parameters that computes `fun` of the whole ones.

  Args:
    fun: takes a tree of parameters first, and then trees of arrays.
    parts: the division of each leaf of the first; `None` for a whole one.
    scales: the scale, f32[], of each leaf that crosses in FP8; `None` for the others, or for all.
  """
  scales = [None] * len(parts) if scales is None else scales

  def of_parts(params: PyTree, *args: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(params)
    rows = list(zip(leaves, parts, scales, strict=True))
    shapes = [x if part is None else part.whole_type(x) for x, part, _ in rows]
    closed, out = jax.make_jaxpr(fun, return_shape=True)(jax.tree.unflatten(structure, shapes), *args)
    values = [x if part is None else divided(part, (x, scale)) for x, part, scale in rows]
    results = _evaluate(closed, [*values, *jax.tree.leaves(args)], fenced=True)
    return jax.tree.unflatten(jax.tree.structure(out), results)

  return of_parts


def _evaluate(jaxpr: AnyJaxpr, inputs: Sequence[Value], fenced: bool) -> list[Array]:
  """Returns the outputs of a program, none delayed; `fenced` as in `read`."""
  return _arrays(interpret(jaxpr, inputs, functools.partial(_apply, fenced)), fenced)


def _arrays(values: Sequence[Value], fenced: bool) -> list[Array]:
  """Returns values, each read by itself if it is delayed."""
  return [read(lambda x: [x], [x], fenced)[0] for x in values]


def _apply(fenced: bool, equation: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
  """Returns the results of an equation; `fenced` as in `read`."""
  if not any(isinstance(x, Delayed) for x in operands):
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
    isinstance(x, Delayed) or not is_variable(a) for a, x in zip(equation.invars, operands, strict=True)
  )
  can_wait = (kind is None or kind.is_custom_rule) and not has(equation, Trait.PRODUCT)
  if of_parameters and can_wait and not equation.effects:
    if not _joins_small(equation, operands):
      return delay(equation, operands)
    return bind_again(equation, _arrays(operands, fenced))
  with as_traced(equation):
    in_fp8 = [i for i, x in enumerate(operands) if _crosses_in_codes(equation, i, x)]
    if in_fp8:
      return read(functools.partial(_multiply_codes, equation), operands, fenced, in_fp8)
    return read(lambda *xs: _compat.bind(equation, list(xs)), operands, fenced)


def _joins_small(equation: JaxprEqn, operands: Sequence[Value]) -> bool:
  """Returns whether an equation makes several parameters one that is smaller than each, as a sum of squares.

  If its results were delayed, all those parameters would be gathered at once.
  """
  shards = shards_of(operands).values()
  size = sum(math.prod(shape_of(v)) for v in equation.outvars)
  return len(shards) > 1 and size < min(shard.size for shard, _ in shards)


def _crosses_in_codes(equation: JaxprEqn, i: int, x: Value) -> bool:
  """Returns whether an equation multiplies a parameter's FP8 numbers as they cross."""
  found = parameter_of(x)
  if found is None:
    return False
  part, (_, scale), _ = found
  return scale is not None and takes_codes(equation, i, part.gather_dtype)


def _multiply_codes(equation: JaxprEqn, *operands: Array | InFp8) -> list[Array]:
  with _compat.context_of(equation):
    return [multiply_codes(equation, operands)]


def _of_parts(equation: JaxprEqn, operands: Sequence[Value]) -> list[Array] | list[Delayed] | None:
  """Returns the results of an equation that a device computes from its part of a parameter, or `None`."""
  found = parameter_of(operands[0])
  indices = [x for x in operands[1:] if not isinstance(x, Delayed)]
  if found is None or len(indices) < len(operands) - 1:
    return None
  part, (shard, scale), casts = found
  with as_traced(equation):
    if looks_up_rows(equation, part):
      rows = [look_up(equation, part, shard, indices[0])]
      return functools.reduce(lambda rows, cast: bind_again(cast, rows), casts, rows)
    if equation.primitive is jax.lax.squeeze_p:
      dimensions = equation.params["dimensions"]
      return [divided(part.without(dimensions), (jax.lax.squeeze(shard, dimensions), scale), casts)]
    cut = _slice(equation, part.dimension, shard, indices)
  return None if cut is None else [divided(part, (cut, scale), casts)]


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


def _remat(fenced: bool, equation: JaxprEqn, operands: Sequence[Value]) -> list[Array]:
  body, p = bodies_of(equation)[0], equation.params
  fences = p["prevent_cse"]
  # A region that is recomputed as a whole may share gathered parameters with the backward pass behind it.
  apart = p["policy"] is None and (fences if isinstance(fences, bool) else any(fences))
  run = lambda *inputs: _evaluate(body, inputs, fenced and not apart)
  if not isinstance(fences, bool):  # one for each operand
    fences = tuple(f or isinstance(x, Delayed) for f, x in zip(fences, operands, strict=True))
  with as_traced(equation):
    return jax.checkpoint(run, policy=p["policy"], prevent_cse=fences)(*operands)


def _scan(fenced: bool, equation: JaxprEqn, operands: Sequence[Value]) -> list[Array]:
  consts, carry, options = scan_parts(equation)
  first = consts + carry
  found = {i: parameter_of(x) for i, x in enumerate(operands) if i >= first}
  # A parameter that is divided over the layers themselves is gathered whole.
  inside = {i: row for i, row in found.items() if row is not None and row[0].dimension > 0}

  def run(*arrays: PyTree) -> list[Array]:
    xs = [x[0] if first + i in inside else x for i, x in enumerate(arrays[first:])]

    def step(carried: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
      inputs: list[Any] = [*arrays[:consts], *carried, *xs]
      for i, (part, _, casts) in inside.items():
        inputs[i] = divided(part.without((0,)), (inputs[i], arrays[i][1]), casts)
      out = _evaluate(equation.params["jaxpr"], inputs, fenced=False)  # the backward pass is another loop
      return out[:carry], out[carry:]

    with as_traced(equation):
      carried, ys = jax.lax.scan(step, list(arrays[consts:first]), xs, **options)
    return [*carried, *ys]

  return read(run, [inside[i][1] if i in inside else x for i, x in enumerate(operands)], fenced)
