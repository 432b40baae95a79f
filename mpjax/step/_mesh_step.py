"""`Layout`: a training step on a mesh: where its state lies, and how its gradients come together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._tree import named_leaves
from mpjax.sharding._mesh import batch_shards, batch_spec
from mpjax.sharding._sharding_rules import Rules, dimension, is_spec, specs_like
from mpjax.step import _collectives
from mpjax.step._gather_dtypes import read_in
from mpjax.step._loss import StepLoss, row_count, row_keys
from mpjax.step._train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Layout:
  """A training step on a mesh.

  Attributes:
    mesh: with axes among `data`, `fsdp` and `tensor`; concrete or abstract.
    rules: where parameters lie.
    reduce_dtype: in which gradients cross devices; `None`: float32, or their own where that is wider.
  """

  mesh: Any
  rules: Rules
  reduce_dtype: Any

  @property
  def shards(self) -> int:
    """How many parts a batch has."""
    return batch_shards(self.mesh)

  @property
  def batch_sharding(self) -> NamedSharding:
    """Rows of a batch over the devices."""
    return NamedSharding(self.mesh, batch_spec(self.mesh))

  def shardings(self, state: TrainState) -> TrainState:
    """A `NamedSharding` for each array of a state (arrays or shapes)."""
    specs = self.rules.specs(state.params, self.mesh)
    whole = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
    laid = whole(state).replace(params=specs, opt_state=specs_like(state.opt_state, state.params, specs))
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), laid, is_leaf=is_spec)

  def place(self, state: TrainState) -> TrainState:
    """The state laid out on the mesh, from wherever it is."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
      return self.keep(state)
    return jax.device_put(state, self.shardings(state))

  def keep(self, state: TrainState) -> TrainState:
    """The state, held to where it lies; inside `jit`."""
    return jax.lax.with_sharding_constraint(state, self.shardings(state))

  def check_batch(self, batch: Any, accumulate: int) -> None:
    """Raises `ValueError` for a batch whose rows cannot be divided over the devices."""
    for name, leaf in named_leaves(batch):
      if leaf.ndim and leaf.shape[0] % (self.shards * accumulate):
        micro = f" in accumulate={accumulate} micro-batches" if accumulate > 1 else ""
        raise ValueError(
          f"batch[{name!r}] is {leaf.dtype}{list(leaf.shape)}: expected a first dimension that can "
          f"be divided over {self.shards} devices{micro}"
        )

  def gradients(self, loss: StepLoss, params: Any, state: TrainState, batch: Any) -> Any:
    """What `loss.gradients` returns, of a whole batch: each device runs it on its rows.

    Args:
      loss: of the step.
      params: parameters as it takes them, where they lie.
      state: the state.
      batch: rows of all devices.
    """
    specs = self.rules.specs(state.params, self.mesh)
    rest = state.replace(params={}, opt_state=_scalars(state.opt_state), rng=None)
    own = jax.tree.map(lambda leaf: leaf.dtype, params)

    def each(run: Callable[..., Any], params: Any, rest: TrainState, key: Any, batch: Any) -> Any:
      index = _collectives.shard_index(self.mesh)
      params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, own)
      mine = jax.tree.map(lambda x: _fold(x, index), rest.model_state)
      return run(params, rest.replace(model_state=mine), batch, _keys(loss, key, batch, index)), mine

    def everywhere(run: Callable[..., Any], params: Any) -> Any:
      return _collectives.on_each(
        self.mesh, functools.partial(each, run), (params, rest, state.step_key), batch
      )

    dtypes = self._gathered_in(functools.partial(everywhere, loss.forward), params, specs)
    out, mine = everywhere(loss.gradients, _collectives.gather(self.mesh, params, specs, dtypes))
    value, metrics, grads, model_state, fp8_state = out
    grads = _collectives.reduce(self.mesh, grads, specs, self.reduce_dtype)
    fp8_state = jax.tree.map(lambda x: x.max(0), fp8_state)
    total = _collectives.over_shards
    model_state = jax.tree.map(_unfold, total(model_state), total(mine), state.model_state)
    return total(value), total(metrics, jnp.sum), grads, model_state, fp8_state

  def _gathered_in(self, run: Callable[..., Any], params: Any, specs: Any) -> Any:
    """The dtype to gather each parameter in: the one that the program casts it to wherever it reads it."""
    leaves, structure = jax.tree.flatten(params)
    flat = jax.tree.leaves(specs, is_leaf=is_spec)
    divided = [i for i, spec in enumerate(flat) if dimension(spec, "fsdp") is not None]
    dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
    if divided and any(dtypes[i].itemsize > 2 for i in divided):
      shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
      closed = jax.make_jaxpr(lambda *flat: run(jax.tree.unflatten(structure, flat)))(*shapes)
      for i, read in zip(divided, read_in(closed, divided), strict=True):
        if read is not None and jnp.issubdtype(read, jnp.floating) and read.itemsize < dtypes[i].itemsize:
          dtypes[i] = read
    return jax.tree.unflatten(structure, dtypes)


def _keys(loss: StepLoss, key: Any, batch: Any, index: jax.Array) -> Any:
  """Of a device: a key of its own, or those of its rows, which are numbered through all devices."""
  if key is None:
    return None
  if not loss.by_row:
    return jax.random.fold_in(key, index)
  return row_keys(key, row_count(batch), index)


def _scalars(tree: Any) -> Any:
  """A tree of the same structure with scalars alone: what a loss scale needs of an optimiser's state."""
  is_kept = lambda leaf: leaf.ndim == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
  return jax.tree.map(lambda leaf: leaf if is_kept(leaf) else jnp.zeros([], leaf.dtype), tree)


def _fold(x: Any, index: jax.Array) -> Any:
  if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return x
  fold = lambda key: jax.random.fold_in(key, index)
  for _ in range(x.ndim):
    fold = jax.vmap(fold)
  return fold(x)


def _unfold(new: Any, folded: Any, old: Any) -> Any:
  """A key that was folded for each device, and came back as it was, is the one for all again."""
  return jnp.where(new == folded, old, new) if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else new
