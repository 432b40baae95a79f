"""`dynamic_loss_scale` and `static_loss_scale`: optax transforms that unscale, check and skip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool

from mpjax._calls import require_arrays_only, require_transform
from mpjax._types import Array, PyTree
from mpjax.dtypes import did_you_mean
from mpjax.loss_scale._guard import (
  all_finite,
  but_nonfinite_before,
  is_array,
  keep_dtypes,
  keep_if,
  unscale,
  updated,
)
from mpjax.loss_scale._overwritten import apart
from mpjax.policy import PRESETS, LossScaling, LossScalingSpec, get_policy, parse_loss_scaling


class LossScaleState(NamedTuple):
  """State of a loss-scaling transform.

  Attributes:
    scale: array of shape [] and dtype float32; the factor of the next loss.
    good_steps: array of shape [] and dtype int32; finite steps in a row since the scale last grew.
    skipped_steps: array of shape [] and dtype int32; steps so far that were not `taken`.
    consecutive_skips: array of shape [] and dtype int32; steps since the last taken step.
    grads_finite: array of shape [] and dtype bool; whether the last step's gradients were finite.
    inner_state: state of the wrapped transform.
    hysteresis_left: array of shape [] and dtype int32; non-finite steps until the scale backs off.
    updates_finite: array of shape [] and dtype bool; false if the last step's gradients were finite, but an
      updated parameter or the state that `state_finite` describes was not.
  """

  scale: jax.Array
  good_steps: jax.Array
  skipped_steps: jax.Array
  consecutive_skips: jax.Array
  grads_finite: jax.Array
  inner_state: PyTree
  hysteresis_left: jax.Array
  updates_finite: jax.Array

  @property
  def taken(self) -> jax.Array:
    """bool[]; whether the last step was taken: its gradients, updated parameters and state were finite."""
    return self.grads_finite & self.updates_finite


def dynamic_loss_scale(
  inner: optax.GradientTransformation,
  *,
  init_scale: float = 2.0**16,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  min_scale: float = 1.0,
  max_scale: float = 2.0**24,
  hysteresis: int = 1,
  axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner` with a loss scale that backs off on overflow and grows after finite steps.

  ```python
  tx = mpjax.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
  opt_state = tx.init(params)
  loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)  # gradients of the scaled loss
  updates, opt_state = tx.update(grads, opt_state, params)  # zeros on a skipped step
  params = mpjax.apply_updates(params, updates)
  ```

  `update` takes gradients of the *scaled* loss (see `mpjax.scale_loss`). `inner` gets finite gradients
  unscaled, in float32 or wider, so clipping, weight decay and schedules inside it are right.
  On a non-finite step the updates are zeros and `inner`'s state stays the same bit for bit. The same happens
  on a step whose gradients are finite but whose updates would make a parameter non-finite (`updates_finite`);
  the scale then does not change. Every gradient counts, also one that `inner` does not read: give zeros for a
  leaf that `optax.partition` freezes, as `make_train_step` does.

  The scale grows on the `growth_interval`-th finite step in a row. The first back-off waits for
  `hysteresis` non-finite steps. After it, each non-finite step backs off, until the next growth
  restores the patience (as in Megatron-LM). If `init_scale`, the factors and the bounds are powers of two, so
  is the scale at every step, and unscaling changes no digit. `mpjax.with_loss_scaling` has the rules of other
  libraries as presets.

  Put the loss scale outermost, around everything that reads gradients: a transform before it in a chain sees
  scaled gradients, also infinite ones. `mpjax.loss_scale.check_loss_scaling` checks a transform.

  Keyword arguments of `update` are passed on to `inner`. `grad` is a gradient of the scaled loss, like the
  first argument, and reaches `inner` unscaled. All others are passed on unchanged, so `value`, `value_fn` and
  `grad_fn` belong to the unscaled loss. `state_finite`, bool[], is for the loss scale itself: whether the
  other state that the step changes is finite, such as BatchNorm statistics.
  `optax.value_and_grad_from_state` does not help here: the gradient in the state is unscaled already.

  `inner` does not see leaves under `_overwrite_with_gradient` (FP8 scales and amax histories). Their update
  is their next value, or the old one on a skipped step: use `mpjax.apply_updates`.

  Reference: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.

  Args:
    inner: any optax transform; it sees the unscaled gradients.
    init_scale: first scale.
    growth_factor: above 1.
    backoff_factor: between 0 and 1.
    growth_interval: finite steps in a row before the scale grows.
    min_scale: lower bound of the scale.
    max_scale: upper bound of the scale, at most 2**126.
    hysteresis: non-finite steps before the first back-off.
    axis_name: name of the mapped axis (or axes) of `shard_map`, `pmap` or `vmap` over which all members must
      take the same decision. Not needed under plain `jit`, which checks sharded gradients as a whole.

  Returns:
    A transform with a `LossScaleState`.

  Raises:
    TypeError: if `inner` is not an optax transform.
    ValueError: if an argument is out of range; names it.
  """
  require_transform("dynamic_loss_scale", inner, "mpjax.dynamic_loss_scale(tx, init_scale=2.0**16)")
  factors, bounds = (growth_factor, backoff_factor, growth_interval), (min_scale, max_scale)
  config = LossScaling("dynamic", init_scale, *factors, *bounds, hysteresis)
  return make_loss_scale(inner, config, skip_nonfinite=True, axis_name=axis_name)


def static_loss_scale(
  inner: optax.GradientTransformation,
  scale: float,
  *,
  skip_nonfinite: bool = True,
  axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner` with a fixed loss scale; `scale=1` only guards against non-finite gradients.

  ```python
  tx = mpjax.static_loss_scale(optax.adamw(1e-3), 1024.0)
  ```

  Args:
    inner: any optax transform; it sees the unscaled gradients.
    scale: the scale, from `2**-126` to `2**126`.
    skip_nonfinite: whether to skip steps with non-finite gradients, as `dynamic_loss_scale` does. If false,
      `inner` gets these gradients; they are still counted.
    axis_name: see `dynamic_loss_scale`.

  Returns:
    A transform with a `LossScaleState`.

  Raises:
    TypeError: if `inner` is not an optax transform.
    ValueError: if `scale` is not in range.
  """
  require_transform("static_loss_scale", inner, "mpjax.static_loss_scale(tx, 1024.0)")
  try:
    config = LossScaling(kind="static", init_scale=scale)
  except ValueError as error:
    raise ValueError(str(error).removeprefix("init_")) from error
  return make_loss_scale(inner, config, skip_nonfinite=skip_nonfinite, axis_name=axis_name)


def with_loss_scaling(
  inner: optax.GradientTransformation,
  spec: LossScalingSpec,
  *,
  axis_name: Hashable | None = None,
) -> optax.GradientTransformation:
  """Wraps `inner` with the loss scale that `spec` describes; returns `inner` itself for no loss scale.

  ```python
  tx = mpjax.with_loss_scaling(optax.adamw(1e-3), "fp16")  # around the whole chain
  ```

  Args:
    inner: any optax transform; it sees the unscaled gradients.
    spec: one of these. An `mpjax.LossScaling`. An `mpjax.Policy` or its name (`"fp16"`, `"16-mixed"`,
      `"auto"`, a string of `jmp`), for its `loss_scaling`. The name of a preset (`grad_scaler`, `megatron`,
      `deepspeed`, `keras`, `jmp`, `flax`) or `"dynamic"`. A number, for a static scale. A mapping of
      `LossScaling`'s fields, with `preset` to start from. `None` or `"none"`.
    axis_name: see `dynamic_loss_scale`.

  Returns:
    A transform with a `LossScaleState`, or `inner`.

  Raises:
    ValueError: names the wrong part and the choices.
    TypeError: if `inner` is not an optax transform, or the arguments are swapped.
  """
  if isinstance(spec, optax.GradientTransformation):
    raise TypeError("the arguments are swapped: call mpjax.with_loss_scaling(tx, loss_scaling)")
  require_transform("with_loss_scaling", inner, "mpjax.with_loss_scaling(tx, policy)")
  config = scaling_of(spec)
  if config is None:
    return inner
  return make_loss_scale(inner, config, skip_nonfinite=True, axis_name=axis_name)


def make_loss_scale(
  inner: optax.GradientTransformation,
  config: LossScaling,
  *,
  skip_nonfinite: bool,
  axis_name: Hashable | None = None,
  apply: Callable[[PyTree, PyTree], PyTree] = updated,
) -> optax.GradientTransformationExtraArgs:
  """Makes the transforms of `dynamic_loss_scale`, `static_loss_scale` and `with_loss_scaling`.

  Args:
    inner: any optax transform.
    config: how the scale changes.
    skip_nonfinite: as for `static_loss_scale`.
    axis_name: see `dynamic_loss_scale`.
    apply: (parameters, updates of `inner`) -> the updated parameters.
  """
  inner = optax.with_extra_args_support(inner)
  at_least_one = config.init_scale >= 1 and (config.kind != "dynamic" or config.min_scale >= 1)

  def init(params: PyTree) -> LossScaleState:
    try:
      inner_state = inner.init(params)
    except TypeError:
      require_arrays_only(params)  # if that is the cause, with the way out
      raise
    return first_state(config, inner_state)

  def agree(finite: Bool[Array, ""]) -> Bool[Array, ""]:
    if axis_name is None:
      return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name).astype(bool)

  def update(
    gradients: PyTree,
    state: LossScaleState,
    params: PyTree = None,
    *,
    state_finite: Bool[Array, ""] | bool = True,
    **extra_args: object,
  ) -> tuple[PyTree, LossScaleState]:
    unscaled = unscale(gradients, state.scale)
    if "grad" in extra_args:
      extra_args["grad"] = unscale(extra_args["grad"], state.scale)
    # Division by a scale of at least 1 makes nothing infinite, and XLA for CPU would multiply each gradient
    # a second time to check it after the division. Below 1, a check after it sees both kinds of infinity.
    finite = all_finite(gradients) & (state.scale > 0) if at_least_one else all_finite(unscaled)
    step = lambda inner_state: inner.update(unscaled, inner_state, params, **extra_args)
    updates, inner_state = step(state.inner_state)
    asked = updates
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((gradients, state))):
      # In a program they are computed once more for the question alone. Compilers keep nothing of that, where
      # they would hold the updates of all parameters in memory until the answer is there.
      alone = lambda leaf: jax.lax.optimization_barrier(leaf) if is_array(leaf) else leaf
      asked, _ = step(jax.tree.map(alone, state.inner_state))
    made = all_finite(but_nonfinite_before(apply(params, asked), params)) & state_finite
    inner_state = keep_dtypes(inner_state, state.inner_state)
    new = _adjust(config, state, agree(finite), agree(made))
    if skip_nonfinite:
      keep = functools.partial(keep_if, new.taken)
      inner_state = jax.tree.map(keep, inner_state, state.inner_state)
      zeros = jax.tree.map(lambda u: jnp.zeros_like(u) if is_array(u) else u, updates)
      updates = jax.tree.map(keep, updates, zeros)
    return updates, new._replace(inner_state=inner_state)

  taken = (lambda state: state.taken) if skip_nonfinite else None
  return apart(optax.GradientTransformationExtraArgs(init, update), taken)


def first_state(config: LossScaling, inner_state: PyTree) -> LossScaleState:
  """Returns the first state; no two of its leaves share a buffer, so it can be donated."""
  zero = lambda: jnp.zeros([], jnp.int32)
  return LossScaleState(
    scale=jnp.asarray(config.init_scale, jnp.float32),
    good_steps=zero(),
    skipped_steps=zero(),
    consecutive_skips=zero(),
    grads_finite=jnp.asarray(True),
    inner_state=inner_state,
    hysteresis_left=jnp.asarray(config.hysteresis, jnp.int32),
    updates_finite=jnp.asarray(True),
  )


def _adjust(
  config: LossScaling, state: LossScaleState, finite: jax.Array, updates_finite: jax.Array
) -> LossScaleState:
  """Returns the state's scale and counters after a step whose gradients, and updates, were finite or not.

  If updates are not finite although the gradients are, the scale is not the cause and stays.
  """
  scale, hysteresis_left = state.scale, state.hysteresis_left
  taken = finite & updates_finite
  good_steps = jnp.where(finite, state.good_steps + updates_finite.astype(jnp.int32), 0)
  if config.kind == "dynamic":
    grow = good_steps >= config.growth_interval
    good_steps = jnp.where(grow, 0, good_steps)
    grown = jnp.minimum(scale * config.growth_factor, config.max_scale)
    backed_off = jnp.maximum(scale * config.backoff_factor, config.min_scale)
    back_off = ~finite
    # A compiled step of a small model pays for every instruction, so it counts no patience of 1.
    if config.hysteresis > 1:
      back_off &= hysteresis_left <= 1
      waiting = jnp.where(finite, hysteresis_left, jnp.maximum(hysteresis_left - 1, 1))
      hysteresis_left = jnp.where(grow, config.hysteresis, waiting)
    scale = jnp.where(grow, grown, jnp.where(back_off, backed_off, scale))
  return state._replace(
    scale=scale,
    good_steps=good_steps,
    skipped_steps=state.skipped_steps + (~taken).astype(jnp.int32),
    consecutive_skips=jnp.where(taken, 0, state.consecutive_skips + 1),
    grads_finite=finite,
    hysteresis_left=hysteresis_left,
    updates_finite=updates_finite | ~finite,
  )


def scaling_of(spec: LossScalingSpec) -> LossScaling | None:
  """Returns what `parse_loss_scaling` does; for any other name or string, the loss scaling of that policy."""
  try:
    return parse_loss_scaling(spec)
  except ValueError:
    if not isinstance(spec, str):
      raise
  try:
    return get_policy(spec).loss_scaling
  except ValueError as error:
    raise ValueError(
      f"loss_scaling={spec!r} is neither a loss scaling (none, dynamic, {', '.join(PRESETS)}, a number) nor "
      f"a policy: {error}" + did_you_mean(spec, ["none", "dynamic", *PRESETS])
    ) from error
