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

from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_floating, widen_floating
from mpjax.loss_scale import (
  LossScaleState,
  apart,
  apply_updates,
  find_loss_scales,
  find_scaler,
  hide,
  make_loss_scale,
  map_parts,
  refuse_multi_steps_outside,
  show,
  updated,
)
from mpjax.optim import (
  MasterWeightsState,
  QuantizedState,
  apply_bits,
  dequantize,
  in_full_bytes,
  is_quantized,
  join,
  make_master_weights,
  quantized_state,
  rebuild,
  split_like,
  store_like,
)
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

  scaler: LossScaleState | None
  masters: MasterWeightsState | None
  stored: QuantizedState | None
  user: PyTree


def layers_of(opt_state: PyTree, policy: Policy, guarded: bool) -> Layers:
  """Returns the layers of a state.

  Args:
    opt_state: a state of `with_policy(tx, policy, guarded)`.
    policy: the policy.
    guarded: whether there is a guard if the policy does not scale the loss.
  """
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
  """Returns `tx` with a policy's layers.

  Args:
    tx: any optax transform.
    policy: the policy.
    guarded: puts a guard around it if the policy does not scale the loss.
    give_new: makes updates for `apply_step`, which needs no exception for master weights.

  Raises:
    ValueError: by `init`, if there is more than one loss scale in the state.
  """
  wrapped = optax.with_extra_args_support(tx)
  stored = policy.optimizer_dtype
  if stored is not None:
    wrapped = quantized_state(wrapped, stored.name) if _in_few_bytes(policy) else _in_dtype(wrapped, stored)
  if policy.master_weights is not None:
    wrapped = make_master_weights(wrapped, policy.master_weights, seed=0, give_new=give_new)
  config = policy.loss_scaling or (LossScaling("static", init_scale=1.0) if guarded else None)
  if config is None:
    wrapped = _without_scale(wrapped)
  else:
    apply = functools.partial(apply_step, policy) if give_new else updated
    wrapped = make_loss_scale(wrapped, config, skip_nonfinite=True, apply=apply)

  def init(params: PyTree) -> PyTree:
    state = wrapped.init(params)
    refuse_multi_steps_outside(state)
    scales = find_loss_scales(state)
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

  def init(params: PyTree) -> PyTree:
    return inner.init(cast_floating(params, dtype))

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    return inner.update(cast_floating(updates, dtype), state, cast_floating(params, dtype), **extra)

  return optax.GradientTransformationExtraArgs(init, update)


def _without_scale(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
  """Hides leaves that are overwritten from `tx`, unless it has a loss scale, which does that."""
  hidden = apart(tx)

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    return (hidden if find_scaler(state) is None else tx).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(hidden.init, update)


def apply_step(policy: Policy, params: PyTree, updates: PyTree) -> PyTree:
  """Applies updates of `with_policy(..., give_new=True)`; a leaf that is overwritten becomes its update."""
  if policy.master_weights is None:
    return apply_updates(params, updates)
  applied = apply_bits(hide(params), hide(updates))
  return show(updates, applied, jax.tree.map(lambda u, p: jnp.asarray(u, p.dtype), updates, params))


def masters_of(params: PyTree, layers: Layers) -> PyTree:
  """Returns the master weights: the parameters, in float32 if they have a correction."""
  return params if layers.masters is None else join(params, on_device(layers.masters.correction))


def unrounded(params: PyTree, layers: Layers) -> tuple[PyTree, Layers]:
  """Returns master weights, and layers with which the optimiser's updates change them unrounded."""
  if layers.masters is None:
    return params, layers
  none = jax.tree.map(lambda _: optax.MaskedNode(), params)
  return masters_of(params, layers), layers._replace(masters=layers.masters._replace(correction=none))


def with_masters(policy: Policy, masters: PyTree, layers: Layers) -> tuple[PyTree, Layers]:
  """Returns parameters under a policy, and its layers with the rest of the master weights.

  Args:
    policy: the policy of `layers`.
    masters: master weights of any floating dtype.
    layers: the state.
  """
  params = policy.cast_to_param(masters)
  if layers.masters is None or policy.master_weights is None:
    return params, layers
  split, correction = split_like(hide(masters), hide(params), policy.master_weights)
  of_masters = layers.masters._replace(correction=correction)
  return show(params, split, params), layers._replace(masters=of_masters)


def user_state(tx: optax.GradientTransformation, params: PyTree, layers: Layers) -> tuple[PyTree, PyTree]:
  """Returns master parameters in float32, and the state of the user's optimiser `tx` as it makes it."""
  masters = map_parts(widen_floating, lambda leaf: leaf, masters_of(params, layers))
  if layers.stored is None:
    return masters, layers.user
  like = jax.eval_shape(tx.init, hide(masters))
  plain = lambda leaf, x: dequantize(x).astype(leaf.dtype) if is_quantized(x) else x
  return masters, jax.tree.map(plain, like, rebuild(layers.user))


def adopted(new: Layers, old: Layers, same_scaling: bool) -> tuple[Layers, list[str]]:
  """Returns new layers with what fits of old ones, and the names of the parts that begin anew, for a person.

  Args:
    new: the first state under the new policy.
    old: a state under the old policy.
    same_scaling: also keeps the loss scale.
  """
  scaled = new.scaler is not None and old.scaler is not None
  anew = ["the loss scale"] if scaled and not same_scaling else []
  if not can_adopt(new, old):
    lost = "the optimizer's state, its moments and the counts of its schedules"
    return new, [f"{lost} ({_difference(new, old)})", *anew]
  kept = lambda mine, theirs: mine if mine is None or theirs is None else theirs
  same = _described(new.user) == _described(old.user)
  user = old.user if same else store_like(new.user, _plain(old))
  scaler = kept(new.scaler, old.scaler) if same_scaling else new.scaler
  return Layers(scaler, kept(new.masters, old.masters), kept(new.stored, old.stored), user), anew


def warn_of_what_begins_anew(anew: list[str], step: Array) -> None:
  """Warns the caller of `TrainStep.adopt` of the parts that `adopted` did not keep; not at step 0."""
  known = not isinstance(step, jax.core.Tracer)
  if anew and not (known and int(step) == 0):
    at = f" while step is {int(step)}" if known else ""
    warnings.warn(
      f"adopt starts anew{at}: {'; '.join(anew)}. If you want that, pass warn=False; step.init(params) "
      "starts everything anew, including the step",
      UserWarning,
      stacklevel=3,
    )


def can_adopt(new: Layers, old: Layers) -> bool:
  """Returns whether the state of a user's optimiser fits another, in any format."""
  return _kinds(_plain(new)) == _kinds(_plain(old))


def _difference(new: Layers, old: Layers) -> str:
  """Returns the first leaf in which one state does not fit another."""
  told = [{path: (shape, dtype) for path, shape, dtype in _described(_plain(x))} for x in (new, old)]
  mine, theirs = ({kind[0]: kind for kind in _kinds(_plain(x))} for x in (new, old))
  for path in mine | theirs:
    if mine.get(path) != theirs.get(path):
      now, before = (f"{of[path][1]}{list(of[path][0])}" if path in of else "not there" for of in told)
      return f"{path_text(path)!r} was {before} and is {now}"
  return "its leaves are in another order"


def _plain(layers: Layers) -> PyTree:
  """Returns the user's state on the device, with nothing in few bytes."""
  return in_full_bytes(on_device(rebuild(layers.user)))


def _kinds(tree: PyTree) -> list[tuple[Any, ...]]:
  """Returns `_described` with one floating dtype, except float16, whose range moments can leave."""
  floating = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16
  return [(path, shape, floating(dtype) or dtype) for path, shape, dtype in _described(tree)]


def _described(tree: PyTree) -> list[tuple[Any, ...]]:
  return [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
