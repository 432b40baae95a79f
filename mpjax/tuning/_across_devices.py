"""What crossing devices in few bits does to a step's gradients, found without the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._tree import named_leaves
from mpjax._types import Array, PyTree
from mpjax.fp8._scaling import amax_of, quantise, scale_of
from mpjax.loss_scale._overwritten import map_parts
from mpjax.loss_scale._state_access import find_scaler
from mpjax.policy import Policy, get_policy
from mpjax.sharding import check_mesh, is_spec
from mpjax.step import OVER_DEVICES, Layout, TrainState, TrainStep
from mpjax.step._mesh_step import gathers
from mpjax.step._micro_batches import split_batch


@dataclasses.dataclass(frozen=True)
class AcrossDevices:
  """A step's devices, played one after the other by the one program that has the whole batch.

  Attributes:
    step: without a mesh, under the policy but for what that says of several devices.
    policy: the whole policy.
    layout: how the devices divide rows and parameters; `None` for one device.
  """

  step: TrainStep
  policy: Policy
  layout: Layout | None

  def gathered(self, state: TrainState, batch: PyTree) -> TrainState:
    """Returns a state whose parameters are those that the devices read: rounded, where they cross in FP8.

    Args:
      state: of the step.
      batch: of which the shapes alone matter.
    """
    if self.layout is None or self.policy.gather_dtype is None:
      return state
    options = dataclasses.replace(
      self.step.options,
      policy=get_policy({"base": self.step.policy, "gather_dtype": self.policy.gather_dtype}),
      layout=self.layout,
    )
    on_mesh = TrainStep(self.step.fun, self.step.inner_tx, options)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (state, batch))
    params = jax.eval_shape(on_mesh.loss.compute_params, shapes[0])
    crossing = {path: dtype for path, _, _, dtype in gathers(on_mesh.loss, self.layout, params, *shapes)}
    leaves, structure = jax.tree.flatten(state.params)
    names = [name for name, _ in named_leaves(state.params)]
    read = [
      _through(leaf, np.dtype(crossing[name])) if crossing.get(name, "").startswith("float8") else leaf
      for name, leaf in zip(names, leaves, strict=True)
    ]
    return state.replace(params=jax.tree.unflatten(structure, read))

  def reduced(self, state: TrainState, batch: PyTree, grads: PyTree) -> PyTree:
    """Returns the gradients of a batch with the error of adding those of the devices in few bits.

    Each device's are scaled as the loss is, rounded, and added one after the other, as a ring does.
    The error is relative to the gradient: the devices' loss may be their rows' mean or sum.

    Args:
      state: of the step.
      batch: rows of all devices.
      grads: of the whole batch, unscaled.
    """
    dtype = self.policy.reduce_dtype
    if self.layout is None or self.layout.shards == 1 or dtype is None or dtype.itemsize >= 4:
      return grads
    self.layout.check_batch(batch, self.step.accumulate)
    scaler = find_scaler(state.opt_state)
    scale = jnp.float32(1.0) if scaler is None else scaler.scale
    parts = split_batch(self.layout.shards, jax.tree.map(jnp.asarray, batch))
    wide = narrow = None
    for i in range(self.layout.shards):
      _, mine = self.step.gradients(state, jax.tree.map(lambda x, i=i: x[i], parts))
      crossing = _as_it_crosses(mine, scale, dtype)
      wide, narrow = (mine, crossing) if i == 0 else (_sum(wide, mine), _sum(narrow, crossing))
    return _with_error(grads, wide, narrow, scale)


@contextlib.contextmanager
def on_automatic_axes(step: TrainStep, tree: PyTree) -> Iterator[PyTree]:
  """Yields a step's arrays on explicit axes as they lie on axes that the compiler divides, that mesh set.

  A step with a mesh divides its own program: its loss function sees no explicit axes either. Without one, a
  loss function that takes them is left what it takes.
  """
  is_explicit = lambda x: isinstance(x, jax.Array) and _compat.is_explicit(jax.typeof(x))
  meshes = [x.sharding.mesh for x in jax.tree.leaves(tree) if is_explicit(x)]
  if step.layout is None or not meshes:
    yield tree
    return
  mesh = check_mesh(meshes[0])
  assert isinstance(mesh, jax.sharding.Mesh), "an array lies on devices"
  on_mesh = lambda x: isinstance(getattr(x, "sharding", None), NamedSharding)
  put = lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)) if on_mesh(x) else x
  with jax.set_mesh(mesh):
    yield jax.tree.map(put, tree)


def described(layout: Layout | None, params: PyTree) -> str:
  """Returns a text that differs for layouts that divide rows or parameters otherwise."""
  if layout is None:
    return "one device"
  return f"{dict(layout.mesh.shape)} {jax.tree.leaves(layout.specs(params), is_leaf=is_spec)}"


def without_devices(policy: Policy) -> Policy:
  """Returns a policy without what it says of several devices."""
  return get_policy({"base": policy, **OVER_DEVICES})


# Two programs: within one, a compiler may leave out the rounding between the cast and the sum.
@functools.partial(jax.jit, static_argnums=2)
def _as_it_crosses(grads: PyTree, scale: Array, dtype: np.dtype) -> PyTree:
  """Returns a device's gradients times the loss scale, in the dtype in which they cross."""
  return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(dtype), grads)


@jax.jit
def _sum(total: PyTree, more: PyTree) -> PyTree:
  return jax.tree.map(jnp.add, total, more)


@jax.jit
def _with_error(grads: PyTree, wide: PyTree, narrow: PyTree, scale: Array) -> PyTree:
  """Returns gradients with the difference of the second sum from the first, in the unit of the gradients."""
  norm = lambda tree: jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
  of_sum = norm(wide)
  unit = norm(grads) / jnp.where(of_sum == 0, 1, of_sum)
  off = lambda g, high, low: g + unit * (low.astype(jnp.float32) / scale - high)
  return map_parts(off, lambda g, *_: g, grads, wide, narrow)


def _through(x: Array, dtype: np.dtype) -> Array:
  """Returns a parameter as it comes out of FP8, with one scale for all of it."""
  scale = scale_of(amax_of(x), dtype)
  return (quantise(x, scale, dtype).astype(jnp.float32) / scale).astype(x.dtype)
