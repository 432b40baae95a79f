"""The error in a step's gradients from crossing devices in few bits, computed without the devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Array, PyTree
from mpjax.dtypes import as_shapes, at_least_float32
from mpjax.fp8._scaling import amax_of, quantise, scale_of
from mpjax.loss_scale import find_scaler, hide, map_parts
from mpjax.patterns import named_leaves
from mpjax.sharding import check_mesh, dimension_over, has_explicit_axes, is_spec
from mpjax.step import Layout, TrainState, TrainStep, gathers, to_reduce
from mpjax.tuning import _norms


class AcrossDevices:
  """Simulates a step's devices one after the other, with a program for one device.

  Attributes:
    alone: the step without its mesh.
  """

  def __init__(self, step: TrainStep):
    self._step, self.alone = step, step.without_mesh()

  def gathered(self, state: TrainState, batch: PyTree) -> TrainState:
    """Returns a state with the parameters that the devices read: rounded if they cross in FP8.

    Args:
      state: state of the step.
      batch: a batch; only its shapes matter.
    """
    layout = self._step.layout
    if layout is None or self._step.policy.gather_dtype is None:
      return state
    shapes = as_shapes((state, batch))
    rows = gathers(self._step.loss, layout, *shapes)
    crossing = {path: np.dtype(dtype) for path, _, _, dtype in rows}
    read = [
      _through(leaf, crossing[name]) if name in crossing and crossing[name].itemsize == 1 else leaf
      for name, leaf in named_leaves(state.arrays)
    ]
    return state.replace(arrays=jax.tree.unflatten(jax.tree.structure(state.arrays), read))

  def reduced(self, state: TrainState, batch: PyTree, grads: PyTree) -> PyTree:
    """Returns the gradients of a batch, with the error of adding the devices' gradients in few bits.

    Each device's gradients are multiplied by the loss scale, rounded, and added one after the other, as in a
    ring. Divided gradients are added over `fsdp` and then over `data`, the others over all devices. The error
    is relative to the gradient, because a device's loss may be the mean or the sum of its rows.

    Args:
      state: state of the step.
      batch: the rows of all devices.
      grads: gradients of the whole batch, unscaled and finite.
    """
    layout, dtype = self._step.layout, self._step.policy.reduce_dtype
    if layout is None or layout.shards == 1 or dtype is None or dtype.itemsize >= 4:
      return grads
    layout.check_batch(batch, self.alone.accumulate)
    scaler = find_scaler(state.opt_state)
    scale = jnp.float32(1.0) if scaler is None else scaler.scale
    ring = layout.mesh.shape.get("fsdp", 1)
    wide = over_all = over_ring = divided = None
    for i in range(layout.shards):
      _, mine = self.alone.gradients(state, _rows_of(i, layout.shards, batch))
      crossing = _as_it_crosses(mine, scale, dtype)
      wide, over_all = _sum(wide, mine), _sum(over_all, crossing)
      over_ring = _sum(over_ring if i % ring else None, crossing)
      if i % ring == ring - 1:
        divided = _sum(divided, over_ring)
    choose = lambda spec, *sums: sums[dimension_over(spec, "fsdp") is not None]
    narrow = jax.tree.map(choose, layout.specs(state.arrays), over_all, divided, is_leaf=is_spec)
    norm, of_sum = (_norms.total(_norms.squares(hide(tree))) for tree in (grads, wide))
    return _with_error(grads, wide, narrow, scale, _norms.ratio(norm, of_sum))


@contextlib.contextmanager
def on_automatic_axes(step: TrainStep, tree: PyTree) -> Iterator[PyTree]:
  """Yields a step's arrays with automatic axes in place of explicit ones, and sets that mesh.

  A step with a mesh divides its own program, so its loss function does not see explicit axes either. Without
  a mesh, the arrays do not change.
  """
  is_explicit = lambda x: isinstance(x, jax.Array) and _compat.is_explicit(jax.typeof(x))
  meshes = [x.sharding.mesh for x in jax.tree.leaves(tree) if is_explicit(x)]
  around = jax.sharding.get_abstract_mesh()
  if step.layout is None or not (meshes or has_explicit_axes(around)):
    yield tree
  elif not meshes:
    with jax.sharding.use_abstract_mesh(check_mesh(around).abstract_mesh):
      yield tree
  else:
    mesh = check_mesh(meshes[0])
    assert isinstance(mesh, jax.sharding.Mesh), "an array lies on devices"
    on_mesh = lambda x: isinstance(getattr(x, "sharding", None), NamedSharding)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)) if on_mesh(x) else x
    with jax.set_mesh(mesh):
      yield jax.tree.map(put, tree)


def described(layout: Layout | None, params: PyTree) -> str:
  """Returns a text that differs between layouts that divide rows or parameters differently."""
  if layout is None:
    return "one device"
  return f"{dict(layout.mesh.shape)} {jax.tree.leaves(layout.specs(params), is_leaf=is_spec)}"


# Two programs: in a single one, a compiler may leave out the rounding between the cast and the sum.
@functools.partial(jax.jit, static_argnums=2)
def _as_it_crosses(grads: PyTree, scale: Array, dtype: np.dtype) -> PyTree:
  """Returns a device's gradients times the loss scale, in the dtype in which they cross."""
  return jax.tree.map(lambda g: to_reduce(g.astype(at_least_float32(g.dtype)) * scale, dtype), grads)


@jax.jit
def _sum(total: PyTree | None, more: PyTree) -> PyTree:
  return more if total is None else jax.tree.map(jnp.add, total, more)


@jax.jit
def _with_error(grads: PyTree, wide: PyTree, narrow: PyTree, scale: Array, unit: Array) -> PyTree:
  """Returns gradients plus `unit` times the difference between the narrow and the wide sum."""
  widened = lambda low: low.astype(at_least_float32(low.dtype))
  off = lambda g, high, low: g + unit * (widened(low) / scale - high)
  return map_parts(off, lambda g, *_: g, grads, wide, narrow)


def _rows_of(i: int, devices: int, batch: PyTree) -> PyTree:
  """Returns the rows of one of several devices; a scalar is the same on all."""
  part = lambda x: jnp.reshape(x, (devices, -1, *jnp.shape(x)[1:]))[i] if jnp.ndim(x) else x
  return jax.tree.map(part, batch)


def _through(x: Array, dtype: np.dtype) -> Array:
  """Returns a parameter after a round trip through FP8, with a single scale."""
  scale = scale_of(amax_of(x), dtype)
  return (quantise(x, scale, dtype).astype(jnp.float32) / scale).astype(x.dtype)
