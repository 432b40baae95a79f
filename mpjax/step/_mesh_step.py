"""Gradients of a training step on a mesh: each device runs the loss on its rows, and they are reduced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int32, Shaped

from mpjax._types import Array, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.patterns import named_leaves
from mpjax.sharding import dimension_over, is_spec, keep_axes
from mpjax.step import _collectives
from mpjax.step._collectives import Part
from mpjax.step._gather_dtypes import only_multiplied, read_in
from mpjax.step._gather_where_read import gather_where_read
from mpjax.step._layout import Layout
from mpjax.step._loss import GradientPass, StepLoss, is_unchanged, row_count, row_keys
from mpjax.step._train_state import TrainState
from mpjax.step._trained import only

_WHOLE = PartitionSpec()

# The scales of parameters that cross in FP8.
_Scales = Sequence[Array | None]
# (parameters, state, rows, keys, scales) to a tree of arrays.
_OfRows = Callable[[PyTree, TrainState, PyTree, Array | None, _Scales], PyTree]


def value_and_grad_on_mesh(
  loss: StepLoss,
  layout: Layout,
  params: PyTree,
  state: TrainState,
  batch: PyTree,
  trained: PyTree[bool] | None = None,
) -> GradientPass:
  """Computes what `loss.value_and_grad` does, for a whole batch: each device runs it on its rows.

  Args:
    loss: the step's loss; its policy sets the dtypes in which gradients and parameters cross devices.
    layout: the step's layout.
    params: parameters as the loss takes them, with their shardings.
    state: the state.
    batch: rows of all devices.
    trained: see `loss.value_and_grad`.
  """
  mesh, specs, policy = layout.mesh, layout.specs(state.arrays), loss.options.policy
  devices = _Devices(loss, layout, state, batch)
  read, crossing = devices.gather_dtypes(params)
  scales = _collectives.scales_of(mesh, params, specs, crossing)
  own = jax.tree.map(lambda leaf: leaf.dtype, params)
  if layout.gather == "step":
    gathered = _collectives.gather(mesh, params, specs, read, crossing, scales)
    of_rows = functools.partial(loss.value_and_grad, trained=trained)
    out, mine = devices.run(lambda *args: of_rows(*args[:-1]), gathered, own)
  else:
    parts = _parts(layout, params, specs, crossing, policy.reduce_dtype)

    def of_parts(
      params: PyTree, rest: TrainState, batch: PyTree, keys: Array | None, scales: _Scales
    ) -> GradientPass:
      transform = lambda fun: gather_where_read(fun, parts, scales)
      return loss.value_and_grad(params, rest, batch, keys, of_parts=transform, trained=trained)

    # In float32, so that gradients of half-precision parameters are not rounded before the sum.
    flat = zip(jax.tree.leaves(own), parts, strict=True)
    wide = [dtype if part is None else at_least_float32(dtype) for dtype, part in flat]
    own = jax.tree.unflatten(jax.tree.structure(params), wide)
    over_fsdp = jax.tree.map(lambda spec: keep_axes(spec, ("fsdp",)), specs, is_leaf=is_spec)
    out, mine = devices.run(of_parts, params, own, scales, over_fsdp)
  over_whole = layout.gather == "step"
  reduced = only(trained, specs)
  grads = _collectives.reduce(mesh, out.grads, reduced, policy.reduce_dtype, over_fsdp=over_whole)
  fp8_state = jax.tree.map(lambda x: x.max(0), out.fp8_state)
  total = _collectives.over_shards
  mine = jax.tree.map(lambda x, new: new if is_unchanged(new) else x, mine, out.model_state)
  old = jax.tree.map(lambda x, new: new if is_unchanged(new) else x, state.model_state, out.model_state)
  model_state = jax.tree.map(_unfold, total(out.model_state), total(mine), old)
  return GradientPass(total(out.loss), total(out.metrics, jnp.sum), grads, model_state, fp8_state)


def gathers(
  loss: StepLoss, layout: Layout, params: PyTree, state: TrainState, batch: PyTree
) -> list[tuple[str, tuple[int, ...], str, str]]:
  """Returns path, shape, dtype and gathered dtype of each parameter that is divided over `fsdp`.

  Args:
    loss: the step's loss.
    layout: the step's layout.
    params: parameters as the loss takes them, or their shapes.
    state: the state, or its shapes.
    batch: rows of all devices, or their shapes.
  """
  found: list[PyTree[np.dtype]] = []

  def run(params: PyTree, state: TrainState, batch: PyTree) -> None:
    found[:] = [_Devices(loss, layout, state, batch).gather_dtypes(params)[1]]

  jax.eval_shape(run, params, state, batch)
  specs = jax.tree.leaves(layout.specs(state.arrays), is_leaf=is_spec)
  rows = zip(named_leaves(state.arrays), specs, jax.tree.leaves(found[0]), strict=True)
  return [
    (name, tuple(leaf.shape), np.dtype(leaf.dtype).name, dtype.name)
    for (name, leaf), spec, dtype in rows
    if dimension_over(spec, "fsdp") is not None
  ]


@dataclasses.dataclass(frozen=True)
class _Devices:
  """The devices of a step, each with its rows of a batch.

  Attributes:
    loss: the step's loss.
    layout: the step's layout.
    state: the state.
    batch: rows of all devices.
  """

  loss: StepLoss
  layout: Layout
  state: TrainState
  batch: PyTree

  def run(
    self,
    fun: _OfRows,
    params: PyTree,
    dtypes: PyTree[np.dtype],
    scales: _Scales = (),
    specs: PyTree[PartitionSpec] = _WHOLE,
  ) -> tuple[PyTree, PyTree]:
    """Runs a function on each device; returns its results and the model's state before, stacked by device.

    Args:
      fun: the function.
      params: parameters.
      dtypes: the dtypes in which it takes them.
      scales: scales of the parameters that cross in FP8.
      specs: the division of parameters over `fsdp`.
    """
    mesh, state = self.layout.mesh, self.state
    rest = state.replace(arrays={}, opt_state=_scalars(state.opt_state), rng=None)

    def each(
      params: PyTree, scales: _Scales, rest: TrainState, key: Array | None, batch: PyTree
    ) -> tuple[PyTree, PyTree]:
      index = _collectives.shard_index(mesh)
      as_read = lambda leaf, dtype: leaf if leaf.dtype == dtype else leaf.astype(dtype)  # keys cannot be cast
      params = jax.tree.map(as_read, params, dtypes)
      mine = jax.tree.map(lambda x: _fold(x, index), rest.model_state)
      keys = _keys(self.loss, key, batch, index)
      return fun(params, rest.replace(model_state=mine), batch, keys, scales), mine

    replicated = (params, scales, rest, state.step_key)
    return _collectives.on_each(mesh, each, replicated, self.batch, specs)

  def gather_dtypes(self, params: PyTree) -> tuple[PyTree[np.dtype], PyTree[np.dtype]]:
    """Returns the dtype in which the program reads each parameter, and the dtype to gather it in.

    The two are equal, except for parameters that only products read: these cross in the policy's gather
    dtype.
    """
    asked = self.loss.options.policy.gather_dtype
    own = jax.tree.map(lambda leaf: leaf.dtype, params)
    leaves, structure = jax.tree.flatten(params)
    flat = jax.tree.leaves(self.layout.specs(self.state.arrays), is_leaf=is_spec)
    divided = [i for i, spec in enumerate(flat) if dimension_over(spec, "fsdp") is not None]
    dtypes = [leaf.dtype for leaf in leaves]
    crossing = list(dtypes)
    if divided and (asked is not None or any(dtypes[i].itemsize > 2 for i in divided)):
      shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
      forward = lambda *args: self.loss.forward(*args[:-1])
      closed = jax.make_jaxpr(lambda *flat: self.run(forward, jax.tree.unflatten(structure, flat), own))(
        *shapes
      )
      for i, read in zip(divided, read_in(closed, divided), strict=True):
        if read is not None and jnp.issubdtype(read, jnp.floating) and read.itemsize < dtypes[i].itemsize:
          dtypes[i] = read
      multiplied = only_multiplied(closed, divided) if asked is not None else [False] * len(divided)
      crossing = list(dtypes)
      for i, is_multiplied in zip(divided, multiplied, strict=True):
        crossing[i] = asked if asked is not None and is_multiplied else dtypes[i]
    return jax.tree.unflatten(structure, dtypes), jax.tree.unflatten(structure, crossing)


def _parts(
  layout: Layout,
  params: PyTree,
  specs: PyTree[PartitionSpec],
  dtypes: PyTree[np.dtype],
  reduce_dtype: np.dtype | None,
) -> list[Part | None]:
  """Returns, for each parameter, its division over `fsdp`; `None` for a whole one."""

  def part(leaf: Array, spec: PartitionSpec, dtype: np.dtype) -> Part | None:
    dimension = dimension_over(spec, "fsdp")
    if dimension is None:
      return None
    count, own = layout.mesh.shape["fsdp"], np.dtype(leaf.dtype)
    over_tensor = keep_axes(spec, ("tensor",))
    divided = over_tensor if any(over_tensor) else _WHOLE
    return Part(dimension, count, own, dtype, reduce_dtype, divided)

  flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
  return [*map(part, jax.tree.leaves(params), flat_specs, jax.tree.leaves(dtypes))]


def _keys(loss: StepLoss, key: Array | None, batch: PyTree, index: Int32[Array, ""]) -> Array | None:
  """Returns this device's key, or one key for each of its rows, which are numbered through all devices."""
  if key is None:
    return None
  if not loss.by_row:
    return jax.random.fold_in(key, index)
  return row_keys(key, row_count(batch), index)


def _scalars(tree: PyTree) -> PyTree:
  """Replaces arrays that are not scalars by zeros []: a loss scale reads only scalars of a state."""
  is_kept = lambda leaf: leaf.ndim == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
  return jax.tree.map(lambda leaf: leaf if is_kept(leaf) else jnp.zeros([], leaf.dtype), tree)


def _fold(x: Shaped[Array, "*shape"], index: Int32[Array, ""]) -> Shaped[Array, "*shape"]:
  """Folds the device's index into keys in the model's state; other arrays stay unchanged."""
  if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return x
  fold = lambda key: jax.random.fold_in(key, index)
  for _ in range(x.ndim):
    fold = jax.vmap(fold)
  return fold(x)


def _unfold(new: Array, folded: Array, old: Array) -> Array:
  """Returns the key for all devices instead of one that was folded for each and came back unchanged."""
  return jnp.where(new == folded, old, new) if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else new
