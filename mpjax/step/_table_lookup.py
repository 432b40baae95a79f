"""Rows of a divided table: looked up in the parts, so that rows cross devices and not the table."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import shape_of
from mpjax.step._collectives import Part

_ROWS = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


def looks_up_rows(equation: JaxprEqn, part: Part) -> bool:
  """Returns whether an equation reads rows of a table divided along its rows, and fewer than it has."""
  if equation.primitive is not jax.lax.gather_p or part.dimension != 1 or "tensor" in part.spec:
    return False
  table, indices = map(shape_of, equation.invars[:2])
  dims = equation.params["dimension_numbers"]
  is_lookup = dims == _ROWS._replace(offset_dims=(len(indices) - 1,))
  return is_lookup and equation.params["slice_sizes"] == (1, table[1]) and math.prod(indices) < table[0]


def look_up(equation: JaxprEqn, part: Part, shard: Array, indices: Array) -> Array:
  """Returns rows of a table of which each device has some columns, where `looks_up_rows`. Inside `on_each`.

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
