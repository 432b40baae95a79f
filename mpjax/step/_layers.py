"""The layers of state that a policy puts around the user's optimiser; nothing else knows how they are nested.

A state under a policy is `LossScaleState(MasterWeightsState(QuantizedState(the user's)))`, without the
layers that its policy does not ask for. What these functions do follows the policy under which the state was
made, never the state: a loss scale or master weights in it may be the user's own.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from mpjax import loss_scale, optim
from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_floating, widen_floating
from mpjax.patterns import path_text
from mpjax.policy import LossScaling, Policy
from mpjax.sharding import on_device


class Layers(NamedTuple):
  """The state of an optimiser under a policy, layer by layer; `None` for a missing layer.

  Attributes:
    scaler: the loss scale, or the guard of a policy without one.
    masters: corrections of the parameters.
    stored: that the state is in few bytes.
    user: the state of the user's optimiser, as it is stored.
  """

  scaler: loss_scale.LossScaleState | None
  masters: optim.MasterWeightsState | None
  stored: optim.QuantizedState | None
  user: PyTree


def layers_of(opt_state: PyTree, policy: Policy, guarded: bool) -> Layers:
  """Returns the layers of a state of `with_policy(tx, policy, guarded)`."""
  scaler = masters = stored = None
  if guarded or policy.loss_scaling is not None:
    scaler, opt_state = opt_state, opt_state.inner_state
  if policy.master_weights is not None:
    masters, opt_state = opt_state, opt_state.inner_state
  if _in_few_bytes(policy):
    stored, opt_state = opt_state, opt_state.inner_state
  return Layers(scaler, masters, stored, opt_state)


def state_of(layers: Layers) -> PyTree:
  """Inverts `layers_of`."""
  state = layers.user
  for layer in (layers.stored, layers.masters, layers.scaler):
    state = state if layer is None else layer._replace(inner_state=state)
  return state


def with_policy(
  tx: optax.GradientTransformation, policy: Policy, guarded: bool, give_new: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with a policy's layers; its `init` raises `ValueError` for more than one loss scale.

  `guarded` puts a guard around it if the policy does not scale the loss. `give_new` makes updates for
  `apply_step`, which needs no exception for master weights.
  """
  wrapped = optax.with_extra_args_support(tx)
  stored = policy.optimizer_dtype
  if stored is not None:
    few_bytes = _in_few_bytes(policy)
    wrapped = optim.quantized_state(wrapped, stored.name) if few_bytes else _in_dtype(wrapped, stored)
  if policy.master_weights is not None:
    wrapped = optim.make_master_weights(wrapped, policy.master_weights, seed=0, give_new=give_new)
  config = policy.loss_scaling or (LossScaling("static", init_scale=1.0) if guarded else None)
  if config is None:
    wrapped = _without_scale(wrapped)
  else:
    apply = functools.partial(apply_step, policy) if give_new else loss_scale.updated
    wrapped = loss_scale.make_loss_scale(wrapped, config, skip_nonfinite=True, apply=apply)

  def init(params: PyTree) -> PyTree:
    state = wrapped.init(params)
    loss_scale.refuse_multi_steps_outside(state)
    scales = loss_scale.find_loss_scales(state)
    if len(scales) > 1:
      said = "skip_nonfinite=True" if policy.loss_scaling is None else f"policy {policy.label}"
      where = ", ".join(path or "the top" for path in scales)
      raise ValueError(
        f"{len(scales)} loss scales in the optimiser's state, at {where}: a step has one. If {said} adds one "
        "to that of tx, pass tx without its own, or policy={'base': 'fp16', 'loss_scaling': 'none'} to keep "
        "it, without skip_nonfinite"
      )
    return state

  return optax.GradientTransformationExtraArgs(init, wrapped.update)


def _in_few_bytes(policy: Policy) -> bool:
  return policy.optimizer_dtype is not None and policy.optimizer_dtype.itemsize < 4


def _in_dtype(
  inner: optax.GradientTransformationExtraArgs, dtype: np.dtype
) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` with parameters and gradients, and so its state, in a dtype."""
  cast = functools.partial(cast_floating, dtype=dtype)
  return optax.GradientTransformationExtraArgs(
    lambda params: inner.init(cast(params)),
    lambda updates, state, params=None, **extra: inner.update(cast(updates), state, cast(params), **extra),
  )


def _without_scale(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
  """Hides leaves that are overwritten from `tx`, unless it has a loss scale, which does that."""
  hidden = loss_scale.apart(tx)
  chosen = lambda state: hidden if loss_scale.find_scaler(state) is None else tx
  update = lambda updates, state, *params, **extra: chosen(state).update(updates, state, *params, **extra)
  return optax.GradientTransformationExtraArgs(hidden.init, update)


def apply_step(policy: Policy, params: PyTree, updates: PyTree) -> PyTree:
  """Applies updates of `with_policy(..., give_new=True)`; a leaf that is overwritten becomes its update."""
  if policy.master_weights is None:
    return loss_scale.apply_updates(params, updates)
  applied = optim.apply_bits(loss_scale.hide(params), loss_scale.hide(updates))
  values = jax.tree.map(lambda u, p: jnp.asarray(u, p.dtype), updates, params)
  return loss_scale.show(updates, applied, values)


def masters_of(params: PyTree, layers: Layers) -> PyTree:
  """Returns the master weights: the parameters, in float32 if they have a correction."""
  return params if layers.masters is None else optim.join(params, on_device(layers.masters.correction))


def unrounded(params: PyTree, layers: Layers) -> tuple[PyTree, Layers]:
  """Returns master weights, and layers with which the optimiser's updates change them unrounded."""
  if layers.masters is None:
    return params, layers
  none = jax.tree.map(lambda _: optax.MaskedNode(), params)
  return masters_of(params, layers), layers._replace(masters=layers.masters._replace(correction=none))


def with_masters(policy: Policy, masters: PyTree, layers: Layers) -> tuple[PyTree, Layers]:
  """Returns parameters under a policy, from master weights, and its layers with the rest of these."""
  params = policy.cast_to_param(masters)
  if layers.masters is None or policy.master_weights is None:
    return params, layers
  hide = loss_scale.hide
  split, correction = optim.split_like(hide(masters), hide(params), policy.master_weights)
  of_masters = layers.masters._replace(correction=correction)
  return loss_scale.show(params, split, params), layers._replace(masters=of_masters)


def user_state(tx: optax.GradientTransformation, params: PyTree, layers: Layers) -> tuple[PyTree, PyTree]:
  """Returns master parameters in float32, and the state of the user's optimiser `tx` as it makes it."""
  masters = loss_scale.map_parts(widen_floating, lambda leaf: leaf, masters_of(params, layers))
  if layers.stored is None:
    return masters, layers.user
  like = jax.eval_shape(tx.init, loss_scale.hide(masters))
  plain = lambda leaf, x: optim.dequantize(x).astype(leaf.dtype) if optim.is_quantized(x) else x
  return masters, jax.tree.map(plain, like, optim.rebuild(layers.user))


def adopted(new: Layers, old: Layers, same_scaling: bool) -> tuple[Layers, list[str]]:
  """Returns first layers with what fits of old ones (the scale by `same_scaling`), and what begins anew."""
  anew = ["the loss scale"] if new.scaler and old.scaler and not same_scaling else []
  if misfit := _misfit(new, old):
    lost = "the optimizer's state, its moments and the counts of its schedules"
    return new, [f"{lost} ({misfit})", *anew]
  kept = lambda mine, theirs: mine if mine is None or theirs is None else theirs
  described = lambda tree: [(path, leaf.shape, leaf.dtype) for path, leaf in _leaves(tree)]
  same = described(new.user) == described(old.user)
  user = old.user if same else optim.store_like(new.user, _plain(old))
  scaler = kept(new.scaler, old.scaler) if same_scaling else new.scaler
  return Layers(scaler, kept(new.masters, old.masters), kept(new.stored, old.stored), user), anew


def warn_of_what_begins_anew(anew: list[str], step: Array) -> None:
  """Warns the caller of `TrainStep.adopt` of the parts that `adopted` did not keep; not at step 0."""
  taken = None if isinstance(step, jax.core.Tracer) else int(step)
  if anew and taken != 0:
    at = "" if taken is None else f" while step is {taken}"
    text = (
      f"adopt starts anew{at}: {'; '.join(anew)}. If you want that, pass warn=False; step.init(params) "
      "starts everything anew, including the step"
    )
    warnings.warn(text, UserWarning, stacklevel=3)


def can_adopt(new: Layers, old: Layers) -> bool:
  """Returns whether the state of a user's optimiser fits another, in any format."""
  return _misfit(new, old) is None


def _misfit(new: Layers, old: Layers) -> str | None:
  """Returns the first leaf in which one state does not fit another in any format, for a person, or `None`."""
  # Floating dtypes fit each other, except float16, whose range moments can leave.
  now, before = (dict(_leaves(_plain(layers))) for layers in (new, old))
  floating = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16
  kind = lambda leaf: leaf is not None and (leaf.shape, floating(leaf.dtype) or leaf.dtype)
  shown = lambda leaf: "not there" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
  for path in now | before:
    mine, theirs = now.get(path), before.get(path)
    if kind(mine) != kind(theirs):
      return f"{path_text(path)!r} was {shown(theirs)} and is {shown(mine)}"
  return None if list(now) == list(before) else "its leaves are in another order"


def _plain(layers: Layers) -> PyTree:
  """Returns the user's state on the device, with nothing in few bytes."""
  return optim.in_full_bytes(on_device(optim.rebuild(layers.user)))


def _leaves(tree: PyTree) -> list[tuple[KeyPath, Any]]:
  leaves: list[tuple[KeyPath, Any]] = jax.tree_util.tree_leaves_with_path(tree)
  return leaves
