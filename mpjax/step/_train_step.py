"""`TrainStep`: one jitted, donated training step with a policy applied; `make_train_step` makes it.

The state is one pytree (`TrainState`), so it is checkpointed, sharded and donated as a whole. The loss
function and the model are the user's: a parameter tree, linen variables or an `nnx.Module`.
"""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mpjax._average import worth
from mpjax._lazy import nnx
from mpjax._types import Array, LossFunction, Metrics, PyTree
from mpjax.casting import init_fp8_state
from mpjax.fp8._delayed import grow_gradients
from mpjax.loss_scale import all_finite, find_scaler, find_states, is_inexact, keep_if, unscaled_norm
from mpjax.optim import rebuild
from mpjax.step import _checks, _layers
from mpjax.step._micro_batches import first_of_batch
from mpjax.step._options import StepOptions
from mpjax.step._static_leaves import arrays_of
from mpjax.step._step_views import StepViews
from mpjax.step._train_state import TrainState


class TrainStep(StepViews):
  """One jitted training step, as `make_train_step` returns it.

  Attributes:
    fun: the loss function.
    inner_tx: the user's optimiser.
    options: the options of the step.
    policy: the `Policy` in force.
    tx: `inner_tx` with the policy's state formats, master weights and loss scaling around it.
    loss: the loss function under the policy.
    trained: the parameters that it trains.
    layout: the sharding of state and batches on the mesh; `None` without one.
    needs_batch: whether `init` takes a batch: under delayed FP8 scaling.
    jitted: the jitted `(TrainState, batch) -> (TrainState, metrics)`, for `lower`, `eval_shape` and
      `jax.export`.
  """

  def __init__(self, loss_fn: LossFunction, tx: optax.GradientTransformation, options: StepOptions):
    super().__init__(loss_fn, tx, options)
    self.jitted = jax.jit(self._step, donate_argnums=(0,) if options.donate else ())

  def __repr__(self) -> str:
    return f"TrainStep({getattr(self.fun, '__qualname__', self.fun)}, {self.options})"

  @property
  def accumulate(self) -> int:
    """The number of micro-batches."""
    return self.options.accumulate

  def init(
    self,
    params: PyTree,
    *,
    model_state: PyTree | None = None,
    rng: Array | None = None,
    batch: PyTree | None = None,
  ) -> TrainState:
    """Makes the first state; `params` (a tree or an `nnx.Module`) is cast to `param_dtype`.

    Args:
      params: tree of parameters, an Equinox module, or an `nnx.Module`. Leaves that are not arrays become
        part of the state's structure, and `state.params` has them again.
      model_state: the model's state other than parameters, for a parameter tree.
      rng: key for `loss_fn`'s `rng` or `row_rngs`.
      batch: a batch, or its shapes; needed only for delayed FP8 scaling, with a history for each product.

    Raises:
      ValueError: if an argument is missing that `loss_fn` or the policy takes, or one is given that
        `loss_fn` does not take.
    """
    if self.needs_batch and batch is None:
      raise ValueError(
        "fp8 recipe 'delayed' keeps a history of each product, which depends on the batch: pass "
        "step.init(..., batch=batch), or its shapes; or use recipe 'current'"
      )
    keywords = self.loss.keywords
    _checks.require_given(keywords, self.loss.random, rng, "step.init(..., rng=...)")
    graphdef = None
    if isinstance(params, nnx.Module):
      if model_state is not None or "model_state" in keywords:
        raise ValueError("an nnx.Module carries its own state: loss_fn takes no model_state with it")
      graphdef, params, model_state = nnx.split(params, self.options.filter, ...)
      params, model_state = nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)
    else:
      _checks.require_given(keywords, "model_state", model_state, "step.init(..., model_state=...)")
      _checks.require_arrays(params)
      params = arrays_of(params)
    state = TrainState(
      step=jnp.zeros([], jnp.int32),
      arrays=params,
      model_state=_owned({} if model_state is None else model_state),
      opt_state=(),
      rng=None if rng is None else jnp.copy(rng),
      graphdef=graphdef,
    )
    self.trained.require_some(state)
    trained = self.trained.parameters(state)
    _checks.require_differentiable(trained)
    # Owned first: an optimiser's zeros would not be divided like weakly typed arrays.
    params = _owned(self.trained.whole(state, self.policy.cast_to_param(trained), params))
    opt_state = self.tx.init(self.trained.seen(state, params))
    state = state.replace(arrays=params, opt_state=_owned(opt_state))
    if self.needs_batch:
      state = state.replace(fp8_state=self._init_fp8(state, batch))
    return state if self.layout is None else self.layout.place(state)

  def _init_fp8(self, state: TrainState, batch: PyTree) -> PyTree:
    parts = self.accumulate * self.options.shards
    if parts > 1:
      batch = jax.eval_shape(lambda batch: first_of_batch(parts, batch), batch)
    args, keywords = self.loss.arguments(state, batch)
    return init_fp8_state(self.fun, self.loss.autocast_policy)(*args, **keywords)

  @overload
  def __call__(self, state: TrainState, batch: PyTree, /) -> tuple[TrainState, Metrics]: ...

  @overload
  def __call__(
    self, model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: PyTree, /, *, rng: Array | None = None
  ) -> Metrics: ...

  def __call__(self, *args: Any, rng: Array | None = None) -> tuple[TrainState, Metrics] | Metrics:
    """Takes a training step: `(state, batch) -> (state, metrics)`; three arguments: `update_in_place`.

    Raises:
      TypeError: for other arguments; names them.
      ValueError: for a state whose buffers an earlier step has reused.
    """
    if len(args) >= 3 and isinstance(args[0], TrainState):
      raise TypeError(
        f"{len(args)} arguments: a batch is one tree, which loss_fn(params, batch) unpacks; call "
        "step(state, (x, y))"
      )
    if len(args) == 3:
      return self.update_in_place(*args, rng=rng)
    if len(args) != 2:
      raise TypeError(
        f"{len(args)} argument(s): expected step(state, batch), or step(model, optimizer, batch) with an "
        "nnx.Module and an nnx.Optimizer"
      )
    if rng is not None:
      raise TypeError("a TrainState carries its own key: pass rng to step.init(..., rng=...) instead")
    _checks.require_state(*args)
    return self._run(self.jitted, *args)

  def update_in_place(
    self, model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: PyTree, *, rng: Array | None = None
  ) -> Metrics:
    """Takes a training step that updates an `nnx.Module` and its optimizer, and returns the metrics.

    Args:
      model: the module; its parameters are in the policy's `param_dtype`.
      optimizer: `nnx.Optimizer(model, step.tx, wrt=...)`.
      batch: the batch.
      rng: key for `loss_fn`'s `rng` or `row_rngs`, the same for all steps: each folds its own from it.

    Raises:
      TypeError: for other arguments.
      ValueError: if the optimizer does not have this step's `tx`, the parameters have another dtype, `rng` is
        missing or not taken, or the policy needs state that a module cannot hold.
    """
    _checks.require_in_place(model, optimizer, self.tx)
    if self.needs_batch:
      raise ValueError(
        "fp8 recipe 'delayed' keeps its histories in a TrainState: use state = step.init(model, batch=batch) "
        "and step(state, batch), or recipe 'current'"
      )
    _checks.require_given(self.loss.keywords, self.loss.random, rng, "step(model, optimizer, batch, rng=...)")
    graphdef, params, model_state = nnx.split(model, self.options.filter, ...)
    state = TrainState(
      step=jnp.asarray(optimizer.step[...], jnp.int32),
      arrays=nnx.as_pure(params),
      model_state=nnx.as_pure(model_state),
      opt_state=rebuild(nnx.as_pure(optimizer.opt_state)),
      rng=None if rng is None else jnp.copy(rng),  # the step reuses the state's buffers
      graphdef=graphdef,
    )
    _checks.require_param_dtype(self.trained.parameters(state), self.policy)
    if self.layout is not None:
      state = self.layout.place(state)
    state, metrics = self.jitted(state, batch)
    nnx.update(model, state.arrays, state.model_state)
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
    optimizer.step[...] = state.step.astype(jnp.uint32)
    return metrics

  def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Takes a training step; this function is jitted."""
    state, metrics = self._laid(self._update, state, batch, lambda laid: (laid, PartitionSpec()))
    return state if self.layout is None else self.layout.put_away(state), metrics

  def _update(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    out = self._gradient_pass(state, batch)
    loss, metrics, model_state, fp8_state = worth(out.loss), out.metrics, out.model_state, out.fp8_state
    grads, params = self.trained.arguments(state, out.grads)
    extra: dict[str, Array] = {"value": loss}
    pairs = zip(*map(jax.tree.leaves, (model_state, state.model_state)), strict=True)
    changed = [(new, old) for new, old in pairs if new is not old and is_inexact(new)]
    before = find_scaler(state.opt_state)
    if changed and before is not None:
      # An infinity from before the step, as in a mask, may stay.
      extra["state_finite"] = all_finite([jnp.where(jnp.isfinite(old), new, 0) for new, old in changed])
    updates, opt_state = self._exact_tx.update(grads, state.opt_state, params, **extra)
    if self.options.grad_norm:
      metrics |= {"grad_norm": unscaled_norm(grads, before)}
    metrics = _stated_rate(opt_state) | metrics | {"loss": loss}
    scaler = find_scaler(opt_state)
    if scaler is not None and before is not None:
      keep = functools.partial(keep_if, scaler.taken)
      model_state = jax.tree.map(keep, model_state, state.model_state)
      fp8_state = jax.tree.map(keep, fp8_state, state.fp8_state)
      # The next step's gradients belong to a loss with a larger scale: their amaxes will be larger, too.
      fp8_state = grow_gradients(fp8_state, jnp.maximum(scaler.scale / before.scale, 1))
      # The scale of this loss, not of the next one.
      metrics |= {"loss_scale": before.scale}
      metrics |= {name: getattr(scaler, name) for name in _checks.METRICS_OF_SCALER}
    state = state.replace(
      step=state.step + 1,
      arrays=self.trained.moved(state, _layers.apply_step(self.policy, params, updates)),
      model_state=model_state,
      opt_state=opt_state,
      fp8_state=fp8_state,
    )
    return state if self.layout is None else self.layout.keep(state), metrics


def _stated_rate(opt_state: PyTree) -> Metrics:
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


def _owned(tree: PyTree) -> PyTree:
  """Copies a tree, since donation needs buffers without other owners; removes weak types, as steps do."""

  def copy(x: Array) -> Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jnp.copy(x) if is_key else jnp.array(x, dtype=x.dtype)

  return jax.tree.map(copy, tree)
