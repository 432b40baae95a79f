"""The optimiser of a training step under its policy, and its state after a change of policy."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._types import Array, Metrics, PyTree
from mpjax.dtypes import cast_floating, widen_floating
from mpjax.loss_scale import LossScaleState, apply_updates, static_loss_scale, with_loss_scaling
from mpjax.loss_scale._overwritten import hide, keep_from, map_parts, show
from mpjax.loss_scale._state_access import (
  find_loss_scales,
  find_scaler,
  find_states,
  refuse_multi_steps_outside,
)
from mpjax.optim import (
  MasterWeightsState,
  QuantizedState,
  is_quantized,
  quantized_state,
)
from mpjax.optim._convert import dequantize_state, split_like, store_like
from mpjax.optim._master_weights import apply_bits, join, make_master_weights
from mpjax.optim._quantized import dequantize, rebuild
from mpjax.patterns import path_text
from mpjax.policy import Policy
from mpjax.sharding import on_device


def with_policy(
  tx: optax.GradientTransformation,
  policy: Policy,
  skip_nonfinite: bool,
  branch_on_cpu: bool = False,
  give_new: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with the policy's settings: state format, master weights, loss scale.

  Args:
    tx: any optax transform.
    policy: the step's policy.
    skip_nonfinite: puts a guard around it if the policy does not scale the loss.
    branch_on_cpu: see `with_loss_scaling`; for policies that compute in half precision.
    give_new: makes updates for `apply_step`, which needs no exception for master weights.

  Raises:
    ValueError: by `init`, if there is more than one loss scale in the state.
  """
  wrapped = optax.with_extra_args_support(tx)
  stored = policy.optimizer_dtype
  if stored is not None:
    wide = stored.itemsize >= 4
    wrapped = _in_dtype(wrapped, stored) if wide else quantized_state(wrapped, stored.name)
  if policy.master_weights is not None:
    wrapped = make_master_weights(wrapped, policy.master_weights, seed=0, give_new=give_new)
  if policy.loss_scaling is not None:
    half = jnp.dtype(policy.compute_dtype).itemsize < 4
    wrapped = optax.with_extra_args_support(
      with_loss_scaling(wrapped, policy.loss_scaling, branch_on_cpu=branch_on_cpu and half)
    )
  elif skip_nonfinite:
    wrapped = static_loss_scale(wrapped, 1.0)
  else:
    wrapped = _without_scale(wrapped)

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
  kept = keep_from(tx)

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    return (kept if find_scaler(state) is None else tx).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(kept.init, update)


def stated_rate(opt_state: PyTree) -> Metrics:
  """Returns the `learning_rate` in a state, f32[], as `optax.inject_hyperparams` keeps it; else `{}`.

  Also `{}` if several states have one. After a step it is the rate of its update; after a skipped step,
  the rate of the update before.
  """
  stated = [
    state.hyperparams["learning_rate"]
    for state in find_states(opt_state, optax.InjectStatefulHyperparamsState).values()
    if "learning_rate" in state.hyperparams
  ]
  if len(stated) != 1 or jnp.ndim(stated[0]) > 0:
    return {}
  return {"learning_rate": jnp.asarray(stated[0], jnp.float32)}


def apply_step(policy: Policy, params: PyTree, updates: PyTree) -> PyTree:
  """Applies updates of `with_policy(..., give_new=True)`; a leaf that is overwritten becomes its update."""
  if policy.master_weights is None:
    return apply_updates(params, updates)
  applied = apply_bits(hide(params), hide(updates))
  return show(updates, applied, jax.tree.map(lambda u, p: jnp.asarray(u, p.dtype), updates, params))


def masters_of(params: PyTree, opt_state: PyTree) -> PyTree:
  """Returns a step's master weights: the parameters, in float32 if they have a correction."""
  corrections = corrections_of(opt_state)
  return params if corrections is None else join(params, corrections)


def corrections_of(opt_state: PyTree) -> PyTree | None:
  """Returns the corrections of a step's parameters (`MasterWeightsState`) on the device, or `None`."""
  inner = _inner(opt_state)
  return on_device(inner.correction) if isinstance(inner, MasterWeightsState) else None


def user_state(
  tx: optax.GradientTransformation, policy: Policy, has_scale: bool, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns master parameters in float32, and the state of `tx` as `tx` makes it.

  Args:
    tx: the user's optimiser.
    policy: the policy of `opt_state`.
    has_scale: whether the policy, or a guard against non-finite values, puts a loss scale around `tx`.
    params: the parameters.
    opt_state: a state of `with_policy(tx, policy, ...)`.
  """
  masters = map_parts(widen_floating, lambda leaf: leaf, masters_of(params, opt_state))
  # Follows the policy, not the state: a loss scale in the state may be the user's own.
  inner = opt_state.inner_state if has_scale else opt_state
  inner = inner.inner_state if policy.master_weights is not None else inner
  if isinstance(inner, QuantizedState) and policy.optimizer_dtype is not None:
    like = jax.eval_shape(tx.init, hide(masters))
    plain = lambda leaf, x: dequantize(x).astype(leaf.dtype) if is_quantized(x) else x
    inner = jax.tree.map(plain, like, rebuild(inner.inner_state))
  return masters, inner


def on_masters(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
  """Returns master weights, and the state with which the optimiser's updates change them unrounded."""
  inner = _inner(opt_state)
  if not isinstance(inner, MasterWeightsState):
    return params, opt_state
  none = jax.tree.map(lambda _: optax.MaskedNode(), params)
  return join(params, inner.correction), _with_inner(opt_state, inner._replace(correction=none))


def set_masters(policy: Policy, masters: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
  """Returns parameters under a policy, and an optimiser's state with the rest of the master weights.

  Args:
    policy: the policy of `opt_state`.
    masters: master weights of any floating dtype.
    opt_state: a state.
  """
  params = policy.cast_to_param(masters)
  inner = _inner(opt_state)
  if not isinstance(inner, MasterWeightsState):
    return params, opt_state
  # Follows the state, not the policy: the transform may be the user's own.
  kind = next((c.dtype.name for c in jax.tree.leaves(inner.correction)), "stochastic")
  split, correction = split_like(hide(masters), hide(params), kind)
  return show(params, split, params), _with_inner(opt_state, inner._replace(correction=correction))


def adopt_opt_state(
  tx: optax.GradientTransformation, params: PyTree, old: PyTree, same_scaling: bool
) -> tuple[PyTree, list[str]]:
  """Converts an optimiser's state under another policy: parts that fit stay, the others are new.

  Args:
    tx: the optimiser, with the new policy's transforms around it.
    params: the parameters under the new policy.
    old: the state under the old policy.
    same_scaling: also keeps the loss scale.

  Returns:
    The state, and the names of its new parts, for a person.
  """
  new = tx.init(params)
  if same_scaling and _described(new) == _described(old):
    return old, []
  scales = [isinstance(state, LossScaleState) for state in (new, old)]
  anew = ["the loss scale"] if all(scales) and not same_scaling else []
  if not can_adopt(new, old):
    lost = "the optimizer's state, its moments and the counts of its schedules"
    return new, [f"{lost} ({_difference(new, old)})", *anew]
  kept = _moments(old)
  inner = _inner(new)
  moments = inner.inner_state if isinstance(inner, MasterWeightsState) else inner
  moments = store_like(moments, kept)
  if isinstance(inner, MasterWeightsState):
    moments = inner._replace(inner_state=moments)
  return _with_inner(new, moments), anew


def warn_of_what_begins_anew(anew: list[str], step: Array) -> None:
  """Warns the caller of `TrainStep.adopt` of the parts that `adopt_opt_state` did not keep; not at step 0."""
  known = not isinstance(step, jax.core.Tracer)
  if anew and not (known and int(step) == 0):
    at = f" while step is {int(step)}" if known else ""
    warnings.warn(
      f"adopt starts anew{at}: {'; '.join(anew)}. If you want that, pass warn=False; step.init(params) "
      "starts everything anew, including the step",
      UserWarning,
      stacklevel=3,
    )


def can_adopt(new: PyTree, old: PyTree) -> bool:
  """Returns whether an optimiser's state fits another, whatever surrounds them and in any format."""
  return _kinds(_moments(new)) == _kinds(_moments(old))


def _difference(new: PyTree, old: PyTree) -> str:
  """Returns the first leaf in which one state does not fit another."""
  mine, theirs = ({kind[0]: kind for kind in _kinds(_moments(state))} for state in (new, old))
  told = [
    {path: f"{dtype}{list(shape)}" for path, shape, dtype in _described(_moments(s))} for s in (new, old)
  ]
  for path in mine | theirs:
    if mine.get(path) != theirs.get(path):
      now, before = (each.get(path, "not there") for each in told)
      return f"{path_text(path)!r} was {before} and is {now}"
  return "its leaves are in another order"


def _kinds(tree: PyTree) -> list[tuple[Any, ...]]:
  """Returns `_described` with one floating dtype, except float16, whose range moments can leave."""
  floating = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16
  return [(path, shape, floating(dtype) or dtype) for path, shape, dtype in _described(tree)]


def _inner(state: PyTree) -> PyTree:
  return state.inner_state if isinstance(state, LossScaleState) else state


def _with_inner(state: PyTree, inner: PyTree) -> PyTree:
  return state._replace(inner_state=inner) if isinstance(state, LossScaleState) else inner


def _moments(state: PyTree) -> PyTree:
  """Returns the state of the user's optimiser inside the policy's transforms, on the device."""
  inner = _inner(state)
  if isinstance(inner, MasterWeightsState):
    inner = inner.inner_state
  return dequantize_state(on_device(inner))


def _described(tree: PyTree) -> list[tuple[Any, ...]]:
  return [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
