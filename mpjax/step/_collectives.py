"""Collectives of a training step on a mesh: parameters gathered, gradients reduced.

Each is one program over all axes of the mesh with explicit collectives, so that their dtypes follow the
policy. Without them, the compiler would reduce a gradient in the dtype of its product, before the cast
(jax-ml/jax#27496), and once for each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from mpjax._average import Average, is_average, sum_of
from mpjax._types import Array, Mesh, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.fp8 import amax_of, quantise, scale_of
from mpjax.loss_scale import is_overwritten
from mpjax.products import InFp8
from mpjax.sharding import axes_of_batch, batch_shards, dimension_over, is_spec, keep_axes

_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """A device's part of a parameter along `fsdp`. Its methods are for the inside of `on_each`.

  Attributes:
    spec: the spec of the parameter.
    dtype: dtype of the parameter in the program that reads it.
    gather_dtype: dtype in which it is gathered.
    reduce_dtype: dtype in which its gradient is reduced; `None` for float32, or its own if that is wider.
  """

  spec: PartitionSpec
  dtype: np.dtype
  gather_dtype: np.dtype
  reduce_dtype: np.dtype | None = None

  @property
  def dimension(self) -> int:
    """The dimension that is divided over `fsdp`."""
    return tuple(self.spec).index("fsdp")

  def without(self, dimensions: Sequence[int]) -> Part:
    """Returns the division of the parameter without some other dimensions, as one of several in a stack."""
    left = (axis for i, axis in enumerate(self.spec) if i not in dimensions)
    return dataclasses.replace(self, spec=PartitionSpec(*left))

  def whole_type(self, shard: Array) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the parameter that this is a part of."""
    shape = list(shard.shape)
    shape[self.dimension] *= jax.sharding.get_abstract_mesh().shape["fsdp"]
    return jax.ShapeDtypeStruct(tuple(shape), self.dtype)

  def _on_each(self, collective: Callable[[Array], Array], x: Array) -> Array:
    """Applies a collective over `fsdp` to the array of each device of `tensor`: no compiler divides one."""
    around = jax.sharding.get_abstract_mesh()
    is_divided = "tensor" in self.spec and "tensor" not in around.manual_axes
    # Also over a `tensor` of one: XLA for CPUs crashes on a half-precision sum with an axis left to it.
    if not is_divided and around.shape.get("tensor") != 1:
      return collective(x)
    spec = keep_axes(self.spec, ("tensor",)) if is_divided else _WHOLE
    return jax.shard_map(
      collective, in_specs=(spec,), out_specs=spec, axis_names={"tensor"}, check_vma=False
    )(x)

  def gather(self, shard: Array, scale: Array | None = None) -> Array | InFp8:
    """Returns the parameter in the program's dtype, cast first, then gathered; with a scale also in FP8."""
    gather = lambda x: jax.lax.all_gather(x, "fsdp", axis=self.dimension, tiled=True)
    if scale is None:
      return self._on_each(gather, shard.astype(self.gather_dtype)).astype(self.dtype)
    codes = self._on_each(gather, quantise(shard, scale, self.gather_dtype))
    return InFp8((codes.astype(jnp.float32) / scale).astype(self.dtype), codes, scale)

  def reduce(self, gradient: Array, dtype: np.dtype) -> Array:
    """Sums a gradient of the whole parameter over `fsdp`; each device gets its part, in `dtype`."""
    scatter = lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=self.dimension, tiled=True)
    return self._on_each(scatter, to_reduce(gradient, self.reduce_dtype)).astype(dtype)


def value_of(x: Array | InFp8) -> Array:
  """Returns a gathered parameter in the program's dtype."""
  return x.value if isinstance(x, InFp8) else x


def scales_of(mesh: Mesh, params: PyTree, parts: Sequence[Part | None]) -> list[Array | None]:
  """Returns the scale of each parameter that crosses in FP8, f32[]; `None` for others."""
  scaled = {
    i: part for i, part in enumerate(parts) if part and part.gather_dtype.itemsize == 1 < part.dtype.itemsize
  }
  scales: list[Array | None] = [None] * len(parts)
  if not scaled:
    return scales

  def body(*shards: Array) -> Array:
    return jax.lax.pmax(jnp.stack([amax_of(shard) for shard in shards]), mesh.axis_names)

  leaves, in_specs = jax.tree.leaves(params), tuple(part.spec for part in scaled.values())
  mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=_WHOLE, check_vma=False)
  for (i, part), amax in zip(scaled.items(), mapped(*(leaves[i] for i in scaled)), strict=True):
    scales[i] = scale_of(amax, part.gather_dtype)
  return scales


def gather(
  mesh: Mesh, params: PyTree, parts: Sequence[Part | None], scales: Sequence[Array | None]
) -> PyTree:
  """Returns parameters, of which those that are divided are gathered; `scales` are those of `scales_of`."""
  leaves, structure = jax.tree.flatten(params)
  divided = {i: part for i, part in enumerate(parts) if part is not None}
  if not divided:
    return params

  def body(shards: Sequence[Array], scales: Sequence[Array | None]) -> list[Array]:
    rows = zip(divided.values(), shards, scales, strict=True)
    return [value_of(part.gather(shard, scale)) for part, shard, scale in rows]

  specs = [part.spec for part in divided.values()]
  out_specs = [keep_axes(spec, ("tensor",)) for spec in specs]
  run = jax.shard_map(body, mesh=mesh, in_specs=(specs, _WHOLE), out_specs=out_specs, check_vma=False)
  gathered = run([leaves[i] for i in divided], [scales[i] for i in divided])
  for i, whole in zip(divided, gathered, strict=True):
    leaves[i] = whole
  return jax.tree.unflatten(structure, leaves)


def on_each(
  mesh: Mesh,
  fun: Callable[..., PyTree],
  replicated: tuple[PyTree, ...],
  batch: PyTree,
  specs: PyTree[PartitionSpec] = _WHOLE,
) -> PyTree:
  """Runs `fun(*replicated, batch)` on each device with its rows, and stacks results by device.

  A scalar of the batch is the same for all; `specs` divide the first of the replicated trees. The compiler
  handles the mesh's `tensor`.
  """
  axes = axes_of_batch(mesh)
  rows = PartitionSpec(axes)
  of_batch = jax.tree.map(lambda x: rows if x.ndim else _WHOLE, batch)
  return jax.shard_map(
    lambda *args: jax.tree.map(lambda x: jnp.asarray(x)[None], fun(*args)),
    mesh=mesh,
    in_specs=(specs, *[_WHOLE] * (len(replicated) - 1), of_batch),
    out_specs=rows,
    axis_names=set(axes),
    check_vma=False,
  )(*replicated, batch)


def to_reduce(gradient: Array, dtype: np.dtype | None) -> Array:
  """Casts a gradient to the dtype in which it crosses devices."""
  asked = dtype is not None and jnp.issubdtype(gradient.dtype, jnp.floating)
  return gradient.astype(dtype if asked else at_least_float32(gradient.dtype))


def reduce(
  mesh: Mesh, stacked: PyTree, specs: PyTree[PartitionSpec], dtype: np.dtype | None, over_fsdp: bool
) -> PyTree:
  """Averages gradients over the devices that share a batch: one sum for each array, in one dtype.

  They are cast, summed (an overflow of the sum is infinite, and the step is then skipped), cast to
  float32 or wider, and divided by the number of devices. Over `fsdp` each device gets only its own part.
  A leaf that is overwritten instead of differentiated becomes the maximum.

  Args:
    mesh: the step's mesh.
    stacked: tree of local gradients, as `on_each` returns them; `specs` are those of the results.
    dtype: see `Part.reduce_dtype`.
    over_fsdp: `False` if gradients of divided parameters are already summed over `fsdp` (`Part.reduce`).
  """
  axes, shards = axes_of_batch(mesh), batch_shards(mesh)

  def one(path: KeyPath, x: Array, spec: PartitionSpec) -> Array:
    if is_overwritten(path):
      return jax.lax.pmax(x[0], axes)
    wide, axis = at_least_float32(x.dtype), dimension_over(spec, "fsdp")
    x = to_reduce(x[0], dtype)
    if axis is None:
      x = jax.lax.psum(x, axes)
    else:
      # XLA for TPUs turns this into an all-reduce where it expects that to be faster, and always in float16.
      if over_fsdp:
        x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True)
      if "data" in axes and mesh.shape["data"] > 1:
        x = jax.lax.psum(x, "data")
    return x.astype(wide) / shards

  of_stacked = lambda spec: PartitionSpec(axes, *keep_axes(spec, ("tensor",)))
  return jax.shard_map(
    lambda stacked: jax.tree_util.tree_map_with_path(one, stacked, specs),
    mesh=mesh,
    in_specs=(jax.tree.map(of_stacked, specs, is_leaf=is_spec),),
    out_specs=specs,
    check_vma=False,
  )(stacked)


def over_shards(stacked: PyTree, of_integers: Callable[..., Array] = jnp.max) -> PyTree:
  """Merges values that are stacked by device, or by micro-batch.

  It averages floats, takes the first key, merges integers by `of_integers`, and sums the parts of an
  `Average`.
  """

  def one(x: Array | Average) -> Array | Average:
    if is_average(x):
      return sum_of(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return x.mean(0, dtype=at_least_float32(x.dtype)).astype(x.dtype)
    return x[0] if jnp.issubdtype(x.dtype, jax.dtypes.extended) else of_integers(x, axis=0)

  return jax.tree.map(one, stacked, is_leaf=is_average)
