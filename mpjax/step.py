"""`make_train_step`: one jitted, donated training step with a policy applied.

The state is one pytree (`TrainState`), so it is checkpointed, sharded and donated as a whole; the loss
function is the user's, and so is the model: a parameter tree, linen variables or an `nnx.Module`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpjax.casting.autocast import autocast, init_fp8_state, require_recompute
from mpjax.casting.explain import Explanation, explain
from mpjax.casting.modules import give_scopes
from mpjax.casting.paths import Overrides
from mpjax.fp8.delayed import grow_gradients
from mpjax.loss_scale.access import get_loss_scale, scale_loss
from mpjax.loss_scale.finite import unscale
from mpjax.loss_scale.overwritten import apply_updates, hide, map_parts, show
from mpjax.micro_batches import over_micro_batches, split_batch
from mpjax.policy import get_policy, matmul_precision
from mpjax.step_checks import check_differentiable, unpack
from mpjax.step_policy import adopt_opt_state, find_scaler, require_honoured, with_policy
from mpjax.train_state import TrainState

Metrics = dict[str, jax.Array]
_KEYWORDS = ("rng", "model_state")


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  policy: Any = "auto",
  *,
  accumulate: int = 1,
  skip_nonfinite: bool = False,
  cast_batch: bool = True,
  donate: bool = True,
  wrt: Any = nnx.Param,
  recompute: str = "islands",
) -> TrainStep:
  """One jitted training step: casting, loss scaling, accumulation, the update and metrics.

  `loss_fn(params, batch)` returns the loss (floating []), or `(loss, metrics)` with a dict of arrays, or
  `(loss, metrics, model_state)` when it takes `model_state`. It takes two more arguments by keyword if
  its signature names them: `rng`, a fresh key for each step and micro-batch, and `model_state`. For an
  `nnx.Module`, `params` is the module itself, and what it mutates (BatchNorm statistics) is kept.

  A step runs `loss_fn` under `mpjax.autocast` if the policy says `autocast`; otherwise it casts parameters
  and the floating leaves of the batch to `compute_dtype` (once, also under accumulation), never
  `model_state`. It casts what `loss_fn` returns to `output_dtype`; scales the loss if the policy says so;
  and hands gradients in the master dtype to the optimiser. A step with non-finite gradients leaves
  parameters, optimiser and model state as they were.

  Args:
    loss_fn: see above.
    tx: any optax transform; the loss scaling that the policy asks for is put round it. If it has a loss
      scale of its own, the policy must have none.
    policy: whatever `mpjax.get_policy` takes.
    accumulate: number of micro-batches that a batch is split into; gradients and floating metrics are
      averaged over them in float32, integer metrics are summed. Micro-batch `i` is rows `i::accumulate`.
    skip_nonfinite: guard a policy without loss scaling too, by `static_loss_scale(tx, 1)`.
    cast_batch: cast the floating leaves of the batch to the compute dtype; without it `loss_fn` casts
      the inputs itself (and may keep targets in float32).
    donate: give the state's buffers to the new state: the old one cannot be used again.
    wrt: filter for the variables of an `nnx.Module` that are trained.
    recompute: what the backward pass computes again instead of keeping it: as `mpjax.autocast` takes it;
      without autocast `"dots"` keeps the results of matrix products alone, and the others change nothing.

  Returns:
    A `TrainStep`: `state = step.init(params)`, then `state, metrics = step(state, batch)`; or, with an
    `nnx.Optimizer(model, step.tx, wrt=...)`, `metrics = step(model, optimizer, batch)` in place.

  Raises:
    ValueError: if the policy is not understood, asks for something that this step does not do, or
      `accumulate` is not a positive integer.
  """
  return TrainStep(loss_fn, tx, policy, accumulate, skip_nonfinite, cast_batch, donate, wrt, recompute)


class TrainStep:
  """What `make_train_step` returns.

  Attributes:
    policy: the `Policy` in force.
    tx: the optimiser with the policy's loss scaling round it.
    accumulate: number of micro-batches.
    needs_batch: whether `init` takes a batch: under delayed FP8 scaling.
    jitted: the jitted `(TrainState, batch) -> (TrainState, metrics)`, for `lower`, `eval_shape` and
      `jax.export`.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    policy: Any,
    accumulate: int,
    skip_nonfinite: bool,
    cast_batch: bool,
    donate: bool,
    wrt: Any,
    recompute: str,
  ):
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
      raise ValueError(f"accumulate={accumulate!r}: expected a positive integer")
    self.policy = get_policy(policy)
    require_honoured(self.policy)
    self.tx = with_policy(tx, self.policy, skip_nonfinite)
    self.jitted = jax.jit(self._step, donate_argnums=(0,) if donate else ())
    self._jitted_gradients = jax.jit(self._loss_and_gradients)
    # Metrics go to the output dtype below, model state never.
    wide = dataclasses.replace(self.policy, output_dtype=jnp.float32)  # type: ignore[call-arg]
    self._plain_loss_fn = loss_fn
    self.needs_batch = any(recipe.recipe == "delayed" for recipe in Overrides(self.policy, None).recipes)
    self._autocast_policy = wide
    self.accumulate = accumulate
    self._cast_batch = cast_batch
    self._wrt = wrt
    self._recompute = require_recompute(recompute)
    self._made_with = (tx, accumulate, skip_nonfinite, cast_batch, donate, wrt, recompute)
    names = inspect.signature(loss_fn).parameters
    self._keywords = tuple(name for name in _KEYWORDS if name in names)

  def init(
    self, params: Any, *, model_state: Any = None, rng: jax.Array | None = None, batch: Any = None
  ) -> TrainState:
    """The first state; `params` (a tree or an `nnx.Module`) is cast to `param_dtype`.

    Args:
      params: tree of parameters, or an `nnx.Module`.
      model_state: what the model carries besides, for a parameter tree.
      rng: key for `loss_fn`'s `rng`.
      batch: a batch, or its shapes; needed for delayed FP8 scaling alone, which has a history a product.

    Raises:
      ValueError: if an argument is missing that `loss_fn` or the policy takes, or one is given that
        `loss_fn` does not take.
    """
    if self.needs_batch and batch is None:
      raise ValueError(
        "fp8 recipe 'delayed' keeps a history of each product, which depends on the batch: pass "
        "step.init(..., batch=batch), or its shapes; or use recipe 'current'"
      )
    graphdef = None
    if isinstance(params, nnx.Module):
      if model_state is not None or "model_state" in self._keywords:
        raise ValueError("an nnx.Module carries its own state: loss_fn takes no model_state beside it")
      graphdef, params, model_state = nnx.split(params, self._wrt, ...)
      params, model_state = nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)
    for name, value in (("rng", rng), ("model_state", model_state if graphdef is None else None)):
      if (name in self._keywords) != (value is not None):
        verb = "takes" if name in self._keywords else "does not take"
        raise ValueError(
          f"loss_fn {verb} {name!r} but init was {'not ' if value is None else ''}given one: "
          f"name {name!r} in the signature of loss_fn and pass step.init(..., {name}=...)"
        )
    check_differentiable(params)
    params = self.policy.cast_to_param(params)
    # Donation needs buffers that nobody else holds.
    own = lambda tree: jax.tree.map(jnp.copy, tree)
    state = TrainState(
      step=jnp.zeros([], jnp.int32),
      params=own(params),
      model_state=own({} if model_state is None else model_state),
      opt_state=own(self.tx.init(params)),
      rng=None if rng is None else jnp.copy(rng),
      graphdef=graphdef,
    )
    return state.replace(fp8_state=self._init_fp8(state, batch)) if self.needs_batch else state

  def _init_fp8(self, state: TrainState, batch: Any) -> Any:
    if self.accumulate > 1:
      first = lambda batch: jax.tree.map(lambda x: split_batch(self.accumulate, x)[0], batch)
      batch = jax.eval_shape(first, batch)
    args, keywords = self._arguments(state, batch)
    return init_fp8_state(self._plain_loss_fn, self._autocast_policy)(*args, **keywords)

  def __call__(self, *args: Any, rng: jax.Array | None = None) -> Any:
    """`(state, batch) -> (state, metrics)`, or `(model, optimizer, batch) -> metrics` in place."""
    if len(args) == 2:
      return self.jitted(*args)
    if len(args) == 3 and isinstance(args[0], nnx.Module) and isinstance(args[1], nnx.Optimizer):
      return self._in_place(*args, rng=rng)
    raise TypeError("expected step(state, batch) or step(nnx_module, nnx_optimizer, batch)")

  def with_policy(self, policy: Any) -> TrainStep:
    """The same step under another policy; states of both are alike where optimisers and loss scales are."""
    tx, *rest = self._made_with
    return TrainStep(self._plain_loss_fn, tx, policy, *rest)

  def adopt(self, state: TrainState, before: TrainStep) -> TrainState:
    """The state of a step under another policy or optimiser as one of this step.

    Parameters are cast to this policy's `param_dtype`. The optimiser's state stays if it has the structure
    and dtypes of this step's, and is a new one otherwise; so does the loss scale if both policies scale the
    loss in the same way.

    Args:
      state: a state of `before`.
      before: the other step.
    """
    params = self.policy.cast_to_param(state.params)
    same_scaling = self.policy.loss_scaling == before.policy.loss_scaling
    return state.replace(
      params=params,
      opt_state=adopt_opt_state(self.tx, params, state.opt_state, same_scaling),
      fp8_state=state.fp8_state if self.needs_batch else {},
    )

  def gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
    """The unscaled loss and the gradients (unscaled, in float32 or wider) that a step would use.

    For looking at: nothing is updated or donated.
    """
    return self._jitted_gradients(state, batch)

  def _arguments(self, state: TrainState, batch: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Those of the loss function."""
    values = {"rng": state.rng, "model_state": state.model_state}
    model = state.params if state.graphdef is None else state.model
    return (model, batch), {name: values[name] for name in self._keywords}

  def explain(self, state: TrainState, batch: Any) -> Explanation:
    """What autocast does to the loss function under this policy; see `mpjax.explain`.

    Args:
      state: a state, or its shapes (`jax.eval_shape`).
      batch: a batch, or its shapes.
    """
    args, keywords = self._arguments(state, batch)
    return explain(self._plain_loss_fn, self.policy)(*args, **keywords)

  def _loss_and_gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
    with matmul_precision(self.policy):
      loss, _, grads, _, _ = self._gradients(state, batch)
    scaler = find_scaler(state.opt_state)
    if scaler is not None:
      grads = show(grads, unscale(hide(grads), scaler.scale), grads)
    return loss, grads

  def _in_place(self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Any, rng: Any) -> Metrics:
    if optimizer.tx is not self.tx:
      raise ValueError(
        "the optimizer was not made with this step's tx: nnx.Optimizer(model, step.tx, wrt=...)"
      )
    if self.needs_batch:
      raise ValueError(
        "fp8 recipe 'delayed' keeps its histories in a TrainState: use state = step.init(model, batch=batch) "
        "and step(state, batch), or recipe 'current'"
      )
    graphdef, params, model_state = nnx.split(model, self._wrt, ...)
    wrong = {p.dtype.name for p in jax.tree.leaves(params)} - {self.policy.param_dtype.name}
    if wrong:
      raise ValueError(
        f"the model has {', '.join(sorted(wrong))} parameters where the policy has param_dtype="
        f"{self.policy.param_dtype.name}: cast them before the optimizer is made, as in "
        "nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param)))"
      )
    state = TrainState(
      step=jnp.asarray(optimizer.step[...], jnp.int32),
      params=nnx.as_pure(params),
      model_state=nnx.as_pure(model_state),
      opt_state=nnx.as_pure(optimizer.opt_state),
      rng=rng,
      graphdef=graphdef,
    )
    state, metrics = self.jitted(state, batch)
    nnx.update(model, state.params, state.model_state)
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
    optimizer.step[...] = state.step.astype(jnp.uint32)
    return metrics

  def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    with matmul_precision(self.policy):
      loss, metrics, grads, model_state, fp8_state = self._gradients(state, batch)
    updates, opt_state = self.tx.update(grads, state.opt_state, state.params, value=loss)
    metrics["loss"] = loss
    scaler = find_scaler(opt_state)
    if scaler is not None:
      keep = lambda new, old: jnp.where(scaler.grads_finite, new, old)
      model_state = jax.tree.map(keep, model_state, state.model_state)
      fp8_state = jax.tree.map(keep, fp8_state, state.fp8_state)
      # The next step's gradients are those of a loss that is scaled by more: their amaxes will be, too.
      growth = scaler.scale / get_loss_scale(state.opt_state).scale
      fp8_state = grow_gradients(fp8_state, jnp.maximum(growth, 1))
      metrics |= {
        # The scale that this loss was multiplied by, not the next one.
        "loss_scale": get_loss_scale(state.opt_state).scale,
        "grads_finite": scaler.grads_finite,
        "skipped_steps": scaler.skipped_steps,
        "consecutive_skips": scaler.consecutive_skips,
      }
    state = state.replace(
      step=state.step + 1,
      params=apply_updates(state.params, updates),
      model_state=model_state,
      opt_state=opt_state,
      fp8_state=fp8_state,
    )
    return state, metrics

  def _gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Metrics, Any, Any, Any]:
    """Loss and metrics averaged over micro-batches, gradients of the scaled loss, new model and FP8 state."""
    compute_params, rng = self._compute_params(state), state.step_key
    scaled_loss = self._scaled_loss
    if self._recompute == "dots" and not self.policy.autocast:
      scaled_loss = jax.checkpoint(scaled_loss, policy=jax.checkpoint_policies.dots_saveable)
    grad_fn = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)

    def micro_step(model_state: Any, batch: Any, rng: Any) -> tuple[Any, ...]:
      (_, (loss, metrics, model_state)), (grads, fp8_state) = grad_fn(
        compute_params, state.fp8_state, model_state, batch, rng, state
      )
      return loss, metrics, grads, model_state, fp8_state

    if self.accumulate == 1:
      loss, metrics, grads, model_state, fp8_state = micro_step(state.model_state, batch, rng)
      return loss, metrics, _cast_like(grads, state.params), model_state, fp8_state

    n = self.accumulate
    batches = jax.tree.map(functools.partial(split_batch, n), batch)
    rngs = None if rng is None else jax.random.split(rng, n)

    def body(carry: Any, xs: Any) -> Any:
      grads, model_state, fp8_state = carry
      loss, metrics, more, model_state, more_fp8 = micro_step(model_state, *xs)
      add = lambda total, g: total + g.astype(total.dtype)
      grads = map_parts(add, jnp.maximum, grads, more)
      fp8_state = jax.tree.map(jnp.maximum, fp8_state, more_fp8)
      return (grads, model_state, fp8_state), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), state.params)
    first = (zeros, state.model_state, jax.tree.map(jnp.zeros_like, state.fp8_state))
    (grads, model_state, fp8_state), (losses, metrics) = jax.lax.scan(body, first, (batches, rngs))
    grads = map_parts(lambda g: g / n, lambda g: g, grads)
    return losses.mean(), jax.tree.map(over_micro_batches, metrics), grads, model_state, fp8_state

  def _compute_params(self, state: TrainState) -> Any:
    """The parameters that the loss function takes."""
    if self.policy.autocast:
      return state.params
    # FP8 scales and amax histories are state in a dtype of their own.
    return map_parts(self.policy.cast_to_compute, lambda leaf: leaf, state.params)

  def _scaled_loss(
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
    values = {"rng": rng, "model_state": model_state}
    keywords = {name: values[name] for name in self._keywords}
    loss_fn = self._plain_loss_fn
    if not self.policy.autocast and self._cast_batch:
      batch = self.policy.cast_to_compute(batch)
    if self.policy.autocast or around is not autocast:
      policy = self._autocast_policy if self.policy.autocast else None
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
    loss, metrics, returned = unpack(out, takes_state="model_state" in self._keywords)
    if returned is not None:
      model_state = returned
    scaled = loss.astype(jnp.float32)
    if find_scaler(state.opt_state) is not None:
      scaled = scale_loss(loss, state.opt_state)
    # What is reported is in the output dtype; what is differentiated has not gone through it, since the
    # scale itself may not fit there (2**16 in float16).
    loss, metrics = self.policy.cast_to_output((loss, metrics))
    return scaled, (loss.astype(jnp.float32), metrics, _cast_like(model_state, state.model_state))


def _cast_like(new: Any, old: Any) -> Any:
  return jax.tree.map(lambda n, o: n if n.dtype == o.dtype else n.astype(o.dtype), new, old)
