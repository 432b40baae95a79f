"""The loss of a training step under its policy, and its gradients over the micro-batches at hand."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._lazy import nnx
from mpjax._tree import cast_like
from mpjax.casting._autocast import autocast
from mpjax.casting._nnx_modules import give_scopes
from mpjax.loss_scale._overwritten import map_parts
from mpjax.loss_scale._state_access import scale_loss
from mpjax.policy import Policy
from mpjax.step._checks import unpack
from mpjax.step._micro_batches import over_micro_batches, split_batch
from mpjax.step._optimizer import find_scaler
from mpjax.step._train_state import TrainState

Metrics = dict[str, jax.Array]
_KEYWORDS = ("rng", "row_rngs", "model_state")


class StepLoss:
  """A loss function as a training step runs it.

  Attributes:
    fun: the loss function.
    policy: the step's, under which it runs; what it returns is cast to the output dtype afterwards.
    keywords: which of `rng`, `row_rngs` and `model_state` it takes.
  """

  def __init__(
    self,
    fun: Callable[..., Any],
    policy: Policy,
    *,
    accumulate: int,
    cast_batch: bool,
    wrt: Any,
    recompute: str,
  ):
    self.fun = fun
    self.policy = policy
    # Metrics go to the output dtype below, model state never.
    self.autocast_policy = dataclasses.replace(policy, output_dtype=jnp.float32)  # type: ignore[call-arg]
    self._accumulate = accumulate
    self._cast_batch = cast_batch
    self._wrt = wrt
    self._recompute = recompute
    names = inspect.signature(fun).parameters
    self.keywords = tuple(name for name in _KEYWORDS if name in names)
    if {"rng", "row_rngs"} <= set(self.keywords):
      raise ValueError("loss_fn takes both 'rng' and 'row_rngs': expected one of them")

  @property
  def by_row(self) -> bool:
    """Whether it takes a key for each row, rather than one."""
    return "row_rngs" in self.keywords

  def keys(self, state: TrainState, batch: Any) -> jax.Array | None:
    """What the loss function takes as `rng` or `row_rngs` in the next step; `None` for neither."""
    key = state.step_key
    if key is None or not self.by_row:
      return key
    return row_keys(key, row_count(batch))

  def arguments(self, state: TrainState, batch: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Those of the loss function; keys as shapes."""
    keys = jax.eval_shape(self.keys, state, batch)
    values = {"rng": keys, "row_rngs": keys}
    values["model_state"] = state.model_state
    model = state.params if state.graphdef is None else state.model
    return (model, batch), {name: values[name] for name in self.keywords}

  def forward(self, params: Any, state: TrainState, batch: Any, keys: Any) -> Any:
    """The scaled loss of a micro-batch."""
    if self._accumulate > 1:
      batch = jax.tree.map(lambda x: split_batch(self._accumulate, x)[0], batch)
      keys = self._split_keys(keys)[0] if keys is not None else None
    return self.scaled(params, state.fp8_state, state.model_state, batch, keys, state)[0]

  def _split_keys(self, keys: jax.Array) -> jax.Array:
    """Keys for each micro-batch."""
    n = self._accumulate
    return split_batch(n, keys) if self.by_row else jax.random.split(keys, n)

  def gradients(
    self, compute_params: Any, state: TrainState, batch: Any, keys: Any, dtypes: Any = None
  ) -> tuple[jax.Array, Metrics, Any, Any, Any]:
    """Loss, metrics, gradients of the scaled loss, model and FP8 state, of the rows at hand.

    Gradients of a step without accumulation are in the dtypes of the tree `dtypes`, if given.
    """
    scaled_loss = self.scaled
    if self._recompute == "dots" and not self.policy.autocast:
      scaled_loss = jax.checkpoint(scaled_loss, policy=jax.checkpoint_policies.dots_saveable)
    grad_fn = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)

    def micro_step(model_state: Any, batch: Any, rng: Any) -> tuple[Any, ...]:
      (_, (loss, metrics, model_state)), (grads, fp8_state) = grad_fn(
        compute_params, state.fp8_state, model_state, batch, rng, state
      )
      return loss, metrics, grads, model_state, fp8_state

    if self._accumulate == 1:
      loss, metrics, grads, model_state, fp8_state = micro_step(state.model_state, batch, keys)
      return loss, metrics, grads if dtypes is None else cast_like(grads, dtypes), model_state, fp8_state

    n = self._accumulate
    batches = jax.tree.map(functools.partial(split_batch, n), batch)
    rngs = None if keys is None else self._split_keys(keys)

    def body(carry: Any, xs: Any) -> Any:
      grads, model_state, fp8_state = carry
      loss, metrics, more, model_state, more_fp8 = micro_step(model_state, *xs)
      add = lambda total, g: total + g.astype(total.dtype)
      grads = map_parts(add, jnp.maximum, grads, more)
      fp8_state = jax.tree.map(jnp.maximum, fp8_state, more_fp8)
      return (grads, model_state, fp8_state), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), compute_params)
    first = (zeros, state.model_state, jax.tree.map(jnp.zeros_like, state.fp8_state))
    (grads, model_state, fp8_state), (losses, metrics) = jax.lax.scan(body, first, (batches, rngs))
    grads = map_parts(lambda g: g / n, lambda g: g, grads)
    return losses.mean(), jax.tree.map(over_micro_batches, metrics), grads, model_state, fp8_state

  def compute_params(self, state: TrainState) -> Any:
    """The parameters that the loss function takes."""
    if self.policy.autocast:
      return state.params
    # FP8 scales and amax histories are state in a dtype of their own.
    return map_parts(self.policy.cast_to_compute, lambda leaf: leaf, state.params)

  def scaled(
    self,
    compute_params: Any,
    fp8_state: Any,
    model_state: Any,
    batch: Any,
    rng: Any,
    state: TrainState,
    around: Callable[..., Any] = autocast,
  ) -> tuple[jax.Array, tuple[jax.Array, Metrics, Any]]:
    """The scaled loss; `around` is what runs the loss function under the policy, in autocast's place."""
    values = {"rng": rng, "row_rngs": rng, "model_state": model_state}
    keywords = {name: values[name] for name in self.keywords}
    loss_fn = self.fun
    if not self.policy.autocast and self._cast_batch:
      batch = self.policy.cast_to_compute(batch)
    if self.policy.autocast or around is not autocast:
      policy = self.autocast_policy if self.policy.autocast else None
      loss_fn = around(loss_fn, policy, recompute=self._recompute, fp8_state=fp8_state or None)
    if state.graphdef is None:
      out = loss_fn(compute_params, batch, **keywords)
    else:
      model = nnx.merge(state.graphdef, compute_params, model_state)
      if not self.policy.autocast:  # which names modules itself
        give_scopes((model,))
      out = loss_fn(model, batch, **keywords)
      mutated = nnx.split(model, self._wrt, ...)[2]
      pure = nnx.as_pure if isinstance(model_state, nnx.State) else nnx.to_pure_dict
      model_state = pure(mutated)
    loss, metrics, returned = unpack(out, takes_state="model_state" in self.keywords)
    if returned is not None:
      model_state = returned
    scaled = loss.astype(jnp.float32)
    if find_scaler(state.opt_state) is not None:
      scaled = scale_loss(loss, state.opt_state)
    # What is reported is in the output dtype; what is differentiated has not gone through it, since the
    # scale itself may not fit there (2**16 in float16).
    loss, metrics = self.policy.cast_to_output((loss, metrics))
    return scaled, (loss.astype(jnp.float32), metrics, cast_like(model_state, state.model_state))


def row_count(batch: Any) -> int:
  """How many rows a batch has; its scalars have none."""
  rows: int = next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
  return rows


def row_keys(key: jax.Array, rows: int, part: Any = 0) -> jax.Array:
  """A key for each row, which are numbered through all parts of a batch; this is one of them."""
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, part * rows + jnp.arange(rows))
