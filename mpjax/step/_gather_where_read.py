"""Parameters gathered where a program reads them, and again in its backward pass.

The program of a loss function is evaluated again with a device's parts instead of whole parameters. Values
computed only from parameters are delayed; an equation that reads one with other values gathers it (`read`),
except for rows of a table (`look_up`).

Loops gather slices in their bodies, and loop invariants once before them. In a
conditional no device may wait for another, so what its branches read is gathered before it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax

from mpjax import _compat
from mpjax._types import AnyJaxpr, Array, JaxprEqn, PyTree, Var
from mpjax.jaxpr import (
  CallKind,
  Trait,
  as_traced,
  bind_again,
  bodies_of,
  call_kind,
  constants_of,
  has,
  is_variable,
  live,
  open_jaxpr,
  scan_parts,
  shape_of,
)
from mpjax.products import InFp8, multiply_codes, takes_codes
from mpjax.step._collectives import Part
from mpjax.step._divided_values import (
  Divided,
  Made,
  Scope,
  Shard,
  Value,
  is_put_off,
  read,
  results_of,
  roots_of,
)
from mpjax.step._table_lookup import look_up, looks_up_rows

_SLICES = (jax.lax.slice_p, jax.lax.dynamic_slice_p, jax.lax.squeeze_p)


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
    pairs = list(zip(leaves, parts, strict=True))
    shapes = [x if part is None else part.whole_type(x) for x, part in pairs]
    closed, out = jax.make_jaxpr(fun, return_shape=True)(jax.tree.unflatten(structure, shapes), *args)
    scope = Scope({}, fenced=True)
    values: list[Value] = [
      x if part is None else scope.add(part, x, scale) for (x, part), scale in zip(pairs, scales, strict=True)
    ]
    results = _evaluate(closed, [*values, *jax.tree.leaves(args)], scope)
    return jax.tree.unflatten(jax.tree.structure(out), results)

  return of_parts


def _evaluate(jaxpr: AnyJaxpr, inputs: Sequence[Value], scope: Scope) -> list[Array]:
  """Returns the outputs of a program, none delayed; see `_values`."""
  return [read(lambda x: [x], [x], scope)[0] for x in _values(jaxpr, inputs, scope)]


def _values(jaxpr: AnyJaxpr, inputs: Sequence[Value], scope: Scope) -> list[Value]:
  """Returns the outputs of a program.

  Args:
    jaxpr: the program.
    inputs: its arguments.
    scope: the scope of the arguments.
  """
  body = open_jaxpr(jaxpr)
  values: dict[Var, Value] = dict(zip(body.constvars, constants_of(jaxpr), strict=True))
  values |= zip(body.invars, inputs, strict=True)
  for equation in live(body).equations:
    operands = [values[a] if is_variable(a) else a.val for a in equation.invars]
    values |= zip(equation.outvars, _apply(equation, operands, scope), strict=True)
  return [values[a] if is_variable(a) else a.val for a in body.outvars]


def _apply(equation: JaxprEqn, operands: Sequence[Value], scope: Scope) -> Sequence[Value]:
  """Returns the results of an equation."""
  if not any(map(is_put_off, operands)):
    return bind_again(equation, list(operands))
  kind = call_kind(equation)
  if kind in (CallKind.JIT, CallKind.INLINE):
    with as_traced(equation):
      return _values(bodies_of(equation)[0], operands, scope)
  if kind is CallKind.REMAT:
    return _remat(equation, operands, scope)
  if kind is CallKind.SCAN:
    return _scan(equation, operands, scope)
  is_each = has(equation, Trait.EACH) and has(equation, Trait.ALIAS)
  if kind is None and is_each and len(operands) == len(equation.outvars):
    return operands  # a barrier or a similar equation, which only concerns the compiler
  first = operands[0]
  if isinstance(first, Divided):
    if equation.primitive is jax.lax.convert_element_type_p:
      return [dataclasses.replace(first, casts=(*first.casts, equation))]
    indices = [x for x in operands[1:] if not isinstance(x, (Divided, Made))]
    if equation.primitive in _SLICES and (cut := _slice(equation, first, indices, scope)):
      return [cut]
    if len(indices) == 1 and looks_up_rows(equation, first):
      with as_traced(equation):
        return look_up(equation, first, scope.shards[first.number][0], *indices)
  of_parameters = all(
    is_put_off(x) or not is_variable(a) for a, x in zip(equation.invars, operands, strict=True)
  )
  can_wait = (kind is None or kind.is_custom_rule) and not has(equation, Trait.PRODUCT)
  if of_parameters and can_wait and not equation.effects:
    results = results_of(equation, operands)
    if not _joins_small(equation, results[0], scope):
      return results
    operands = [read(lambda x: [x], [x], scope)[0] for x in operands]
    return bind_again(equation, operands)
  with as_traced(equation):
    in_fp8 = [
      i
      for i, x in enumerate(operands)
      if isinstance(x, Divided) and _is_scaled(x, scope) and takes_codes(equation, i, x.part.gather_dtype)
    ]
    if in_fp8:
      return read(functools.partial(_multiply_codes, equation), operands, scope, in_fp8)
    return read(lambda *xs: _compat.bind(equation, list(xs)), operands, scope)


def _is_scaled(x: Divided, scope: Scope) -> bool:
  return scope.shards[x.number][1] is not None


def _joins_small(equation: JaxprEqn, result: Value, scope: Scope) -> bool:
  """Returns whether results combine several parameters and are smaller than each, as a sum of squares.

  If such results were delayed, all those parameters would be gathered at once.
  """
  roots = roots_of([result])
  size = sum(math.prod(shape_of(v)) for v in equation.outvars)
  return len(roots) > 1 and size < min(scope.shards[number][0].size for number in roots)


def _multiply_codes(equation: JaxprEqn, *operands: Array | InFp8) -> list[Array]:
  with _compat.context_of(equation):
    return [multiply_codes(equation, operands)]


def _slice(equation: JaxprEqn, x: Divided, indices: Sequence[Array], scope: Scope) -> Divided | None:
  """Returns a slice of a parameter that keeps the divided dimension whole, as a slice of the part."""
  p, dim, shard = equation.params, x.part.dimension, scope.shards[x.number][0]
  if equation.primitive is jax.lax.squeeze_p:
    part = x.part.without(p["dimensions"])
    return scope.narrow(x, part, jax.lax.squeeze(shard, p["dimensions"]))
  out = list(shape_of(equation.outvars[0]))
  if out[dim] != shape_of(equation.invars[0])[dim]:
    return None
  out[dim] = shard.shape[dim]
  with as_traced(equation):
    if equation.primitive is jax.lax.dynamic_slice_p:
      cut = jax.lax.dynamic_slice(shard, list(indices), out)
    else:
      limits = [*p["limit_indices"][:dim], shard.shape[dim], *p["limit_indices"][dim + 1 :]]
      cut = jax.lax.slice(shard, p["start_indices"], limits, p["strides"])
  return scope.narrow(x, x.part, cut)


def _remat(equation: JaxprEqn, operands: Sequence[Value], scope: Scope) -> list[Array]:
  body, p = bodies_of(equation)[0], equation.params
  roots = roots_of(operands)
  fences = p["prevent_cse"]
  # A region that is recomputed as a whole may share gathered parameters with the backward pass behind it.
  apart = p["policy"] is None and (fences if isinstance(fences, bool) else any(fences))
  templates, fenced = [x if is_put_off(x) else None for x in operands], scope.fenced and not apart

  def run(shards: dict[int, Shard], others: Sequence[Array]) -> list[Array]:
    given = iter(others)
    inputs = [next(given) if x is None else x for x in templates]
    return _evaluate(body, inputs, Scope(dict(shards), fenced))

  others = [x for x in operands if not is_put_off(x)]
  shards = {number: scope.shards[number] for number in roots}
  with as_traced(equation):
    if not isinstance(fences, bool):  # one for each operand
      of_others = [f for f, x in zip(fences, operands, strict=True) if not is_put_off(x)]
      fences = (True, of_others)
    return jax.checkpoint(run, policy=p["policy"], prevent_cse=fences)(shards, others)


def _scan(equation: JaxprEqn, operands: Sequence[Value], scope: Scope) -> list[Array]:
  consts, carry, options = scan_parts(equation)
  first = consts + carry
  # A parameter that is divided over the layers themselves is gathered whole.
  inside = {
    i: x for i, x in enumerate(operands) if i >= first and isinstance(x, Divided) and x.part.dimension > 0
  }
  shards = {i: scope.shards[x.number] for i, x in inside.items()}
  scales = {i: scale for i, (_, scale) in shards.items() if scale is not None}

  def run(*arrays: Array) -> list[Array]:
    scale_of = dict(zip(scales, arrays[len(operands) :], strict=True)).get

    def step(carried: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
      inputs: list[Value] = [*arrays[:consts], *carried, *xs]
      body = Scope({}, fenced=False)  # the backward pass is another loop
      for i, x in inside.items():
        slice_ = body.add(x.part.without((0,)), xs[i - first], scale_of(i))
        inputs[i] = dataclasses.replace(slice_, casts=x.casts)
      out = _evaluate(equation.params["jaxpr"], inputs, body)
      return out[:carry], out[carry:]

    with as_traced(equation):
      xs = list(arrays[first : len(operands)])
      carried, ys = jax.lax.scan(step, list(arrays[consts:first]), xs, **options)
    return [*carried, *ys]

  mixed = [shards[i][0] if i in shards else x for i, x in enumerate(operands)]
  return read(run, [*mixed, *scales.values()], scope)
