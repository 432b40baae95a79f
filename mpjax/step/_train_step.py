"""`TrainStep`: one jitted, donated training step with a policy applied; `make_train_step` makes it.

The state is one pytree (`TrainState`), so it is checkpointed, sharded and donated as a whole. The loss
function and the model are the user's: a parameter tree, linen variables or an `nnx.Module`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, overload

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Float32

from mpjax._average import is_average, worth
from mpjax._lazy import nnx
from mpjax._types import Array, LossFunction, Metrics, PolicyLike, PyTree
from mpjax.casting import Explanation, explain_as_run, init_fp8_state
from mpjax.fp8 import grow_gradients
from mpjax.loss_scale import (
  all_finite,
  find_scaler,
  find_states,
  hide,
  is_inexact,
  keep_if,
  show,
  unscale,
  unscaled_norm,
)
from mpjax.policy import get_policy, matmul_precision
from mpjax.sharding import on_device
from mpjax.step import _checks, _layers
from mpjax.step._layout import Layout, run_on
from mpjax.step._loss import Pass, StepLoss, StepOptions, first_of_batch
from mpjax.step._mesh_step import gathers, value_and_grad_on_mesh
from mpjax.step._optimizer_arguments import with_step_arguments
from mpjax.step._train_state import TrainState, arrays_of, whole_of
from mpjax.step._trained import Trained, merged, only


class TrainStep:
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
    _checks.require_makings(loss_fn, tx)
    self.fun = loss_fn
    self.inner_tx = tx
    self.options = options
    self.policy = options.policy
    self.layout = options.layout
    given = with_step_arguments(tx)
    wrap = functools.partial(_layers.with_policy, given, self.policy, options.skip_nonfinite)
    # Traces the optimiser without the policy, which does not change its use of gradients.
    self.trained = Trained(options.wrt, optax.GradientTransformationExtraArgs(tx.init, given.update))
    self.tx, self._exact_tx = wrap(), wrap(give_new=True)
    self.loss = StepLoss(loss_fn, options)
    self.kept: dict[Hashable, Any] = {}  # what tools made of this step: programs, the step under a policy
    self.needs_batch = self.policy.fp8 is not None and self.policy.fp8.recipe == "delayed"
    self._jitted_gradients = jax.jit(self.loss_and_gradients)
    self._jitted_user_state = jax.jit(self._user_state)
    self.jitted = jax.jit(self._step, donate_argnums=(0,) if options.donate else ())

  def __repr__(self) -> str:
    return f"TrainStep({getattr(self.fun, '__qualname__', self.fun)}, {self.options})"

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
    params = _owned(merged(self.policy.cast_to_param(trained), params))
    opt_state = self.tx.init(self.trained.seen(state, params))
    state = state.replace(arrays=params, opt_state=_owned(opt_state))
    if self.needs_batch:
      parts = self.options.accumulate * self.options.shards
      batch = batch if parts == 1 else jax.eval_shape(functools.partial(first_of_batch, parts), batch)
      args, named = self.loss.arguments(state, batch)
      fp8_state = init_fp8_state(self.fun, self.loss.autocast_policy)(*args, **named)
      state = state.replace(fp8_state=fp8_state)
    return state if self.layout is None else self.layout.place(state)

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
    if len(args) == 3 and not isinstance(args[0], TrainState):
      return self.update_in_place(*args, rng=rng)
    if len(args) != 2:
      given = f"{len(args)} arguments" if len(args) > 2 else f"{len(args)} argument(s)"
      raise TypeError(
        f"{given}: expected step(state, batch), of one tree that loss_fn(params, batch) unpacks, as in "
        "step(state, (x, y)); or step(model, optimizer, batch) with an nnx.Module and an nnx.Optimizer"
      )
    if rng is not None:
      raise TypeError("a TrainState carries its own key: pass rng to step.init(..., rng=...) instead")
    _checks.require_state(*args)
    return self.jitted(_checks.kept(args[0]), args[1])

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
      ValueError: for another `tx` or `param_dtype`, or if the policy needs state that a module cannot hold.
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
      opt_state=(),
      rng=None if rng is None else jnp.copy(rng),  # the step reuses the state's buffers
      graphdef=graphdef,
    )
    trained = self.trained.parameters(state)
    _checks.require_param_dtype(trained, self.policy)
    # The optimizer has mappings for some tuples, and nothing for parameters that are not trained.
    held, structure = jax.tree.flatten(nnx.as_pure(optimizer.opt_state))
    of_step = jax.tree.structure(jax.eval_shape(self.tx.init, trained))
    state = state.replace(opt_state=jax.tree.unflatten(of_step, held))
    if self.layout is not None:
      state = self.layout.place(state)
    state, metrics = self.jitted(state, batch)
    nnx.update(model, state.arrays, state.model_state)
    opt_state = jax.tree.unflatten(structure, jax.tree.leaves(state.opt_state))
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] = state.step.astype(jnp.uint32)
    return metrics

  def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Takes a training step; this function is jitted."""
    state, metrics = run_on(self.layout, self._update, state, batch, lambda laid: (laid, PartitionSpec()))
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

  def _gradient_pass(self, state: TrainState, batch: PyTree) -> Pass:
    """Runs the loss forward and backward over a batch; missing gradients are `optax.MaskedNode`s."""
    trained = self.trained.masks(state).read
    if self.layout is not None:
      self.layout.check_batch(batch, self.options.accumulate)
    with matmul_precision(self.policy):
      if self.layout is not None and self.layout.shards > 1:
        out = value_and_grad_on_mesh(self.loss, self.layout, state, batch, trained)
      else:
        params, keys = self.loss.compute_params(state), self.loss.keys(state.step_key, batch)
        with contextlib.nullcontext() if self.layout is None else self.layout.in_mesh():
          out = self.loss.value_and_grad(params, state, batch, keys, trained, like=state.arrays)
    return out._replace(
      metrics=jax.tree.map(worth, out.metrics, is_leaf=is_average),
      model_state=merged(out.model_state, state.model_state),
    )

  def with_policy(self, policy: PolicyLike) -> TrainStep:
    """Returns the same step under another policy; states are alike if optimisers and scales are."""
    options = dataclasses.replace(self.options, policy=get_policy(policy))
    return TrainStep(self.fun, self.inner_tx, options)

  def with_layout(self, layout: Layout | None) -> TrainStep:
    """Returns the same step on other devices; `None`: without a mesh, as one program over the whole batch."""
    if layout is self.layout:
      return self
    policy = self.policy if layout is not None else self.policy.without_devices()
    options = dataclasses.replace(self.options, policy=policy, layout=layout)
    return TrainStep(self.fun, self.inner_tx, options)

  def without_mesh(self) -> TrainStep:
    """Returns the same step without a mesh."""
    return self.with_layout(None)

  def adopt(self, state: TrainState, before: TrainStep, *, warn: bool = True) -> TrainState:
    """Converts a state of a step under another policy or optimiser to a state of this step.

    Master weights follow this policy: parameters in its `param_dtype`, with its corrections. The optimiser's
    state stays if it has the structure of this step's, in the dtypes of this policy; otherwise it is new. The
    loss scale stays if both policies scale the loss in the same way. `step` always stays.

    Args:
      state: a state of `before`.
      before: the other step.
      warn: emit a `UserWarning` that names the parts that are new.
    """
    state = on_device(state)
    old = before.layers(state)
    masters = self.trained.seen(state, before.masters(state))
    first = self.tx.init(self.policy.cast_to_param(masters))
    same_scaling = self.policy.loss_scaling == before.policy.loss_scaling
    layers, anew = _layers.adopted(self.layers(state.replace(opt_state=first)), old, same_scaling)
    if warn:
      _layers.warn_of_what_begins_anew(anew, state.step)
    params, layers = _layers.with_masters(self.policy, masters, layers)
    state = state.replace(
      arrays=merged(params, state.arrays),
      opt_state=_layers.state_of(layers),
      fp8_state=state.fp8_state if self.needs_batch else {},
    )
    return state if self.layout is None or self.layout.offload is None else self.layout.place(state)

  def layers(self, state: TrainState) -> _layers.Layers:
    """Returns the layers of the optimiser's state of a state of this step."""
    return _layers.layers_of(state.opt_state, self.policy, self.options.skip_nonfinite)

  def masters(self, state: TrainState) -> PyTree:
    """Returns the arrays of a state with master weights, in float32, in place of rounded parameters."""
    seen = _layers.masters_of(self.trained.parameters(state), self.layers(state))
    return merged(seen, state.arrays)

  def user_state(self, state: TrainState) -> tuple[PyTree, PyTree]:
    """Returns the master parameters in float32, and the state of the optimiser that the step was made with.

    ```python
    params, opt_state = step.user_state(state)
    eval_loss = loss_fn(params, batch)  # in float32 under every policy
    ```

    The state has the structure and dtypes of that optimiser, without the policy's loss scale, master weights
    and codes of few bytes. Functions for such a state accept it:
    `optax.contrib.schedule_free_eval_params(opt_state, params)` and `optax.tree_utils.tree_get`.

    Args:
      state: a state of this step, on one device or a mesh; also inside `jit`.

    Returns:
      New arrays on the devices, which later steps do not reuse, divided as `state`'s. Parameters of a tree
      that `wrt` leaves out are unchanged, and have no state; those of a module are left out.
    """
    params, opt_state = self._jitted_user_state(_checks.kept(state))
    return whole_of(params), opt_state

  def _user_state(self, state: TrainState) -> tuple[PyTree, PyTree]:
    state = on_device(state)
    params, opt_state = _layers.user_state(self.inner_tx, self.trained.parameters(state), self.layers(state))
    # Copies, otherwise `jit` would return buffers that the next step reuses.
    arrays, opt_state = jax.tree.map(jnp.copy, (merged(params, state.arrays), opt_state))
    state = state.replace(arrays=arrays, opt_state=opt_state)
    state = state if self.layout is None else self.layout.keep(state)
    if state.graphdef is None or self.options.wrt is None:
      return state.arrays, state.opt_state
    return _bare(self.trained.parameters(state)), _bare(state.opt_state)

  def gradients(self, state: TrainState, batch: PyTree) -> tuple[Float32[Array, ""], PyTree]:
    """Computes the unscaled loss and the gradients (unscaled, in float32 or wider) that a step would use.

    For inspection: nothing is updated or donated.
    """
    _checks.require_state(state, batch)
    return self._jitted_gradients(_checks.kept(state), batch)

  def loss_and_gradients(self, state: TrainState, batch: PyTree) -> tuple[Float32[Array, ""], PyTree]:
    """Computes what `gradients` returns, without `jit`, for tracing."""

    def unscaled(state: TrainState, batch: PyTree) -> tuple[Array, PyTree]:
      out, scaler = self._gradient_pass(state, batch), find_scaler(state.opt_state)
      if scaler is None:
        return worth(out.loss), out.grads
      return worth(out.loss), show(out.grads, unscale(hide(out.grads), scaler.scale), out.grads)

    of_read = lambda laid: (PartitionSpec(), only(self.trained.masks(state).read, laid.arrays))
    return run_on(self.layout, unscaled, state, batch, of_read)

  def carried(self, state: TrainState, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Computes the new `model_state` and `fp8_state`, also for a skipped step; not jitted."""
    of = lambda passed: (passed.model_state, passed.fp8_state)
    return run_on(self.layout, lambda *args: of(self._gradient_pass(*args)), state, batch, of)

  def explain(self, state: TrainState, batch: PyTree) -> Explanation:
    """Returns what autocast does to the loss function under this policy; see `mpjax.explain`.

    State and batch may be shapes (`jax.eval_shape`).
    """
    _checks.require_state(state, batch)
    args, keywords = self.loss.arguments(state, batch)
    recompute = self.options.recompute
    explanation = explain_as_run(self.fun, args, keywords, self.policy, recompute=recompute)
    if self.layout is None or self.layout.shards == 1:
      return explanation
    return dataclasses.replace(explanation, gathers=gathers(self.loss, self.layout, state, batch))

  def _explain_(self, *args: Any, policy: PolicyLike | None) -> Explanation:
    """Implements `mpjax.explain(step, state, batch)`."""
    state, batch = _checks.require_state_and_batch("explain", args)
    if policy is None:
      return self.explain(state, batch)
    other = self.with_policy(get_policy(policy).without_histories())
    return other.explain(jax.eval_shape(lambda s: other.adopt(s, self, warn=False), state), batch)


def _stated_rate(opt_state: PyTree) -> Metrics:
  """Returns the `learning_rate`, f32[], of the last update that was taken, if one state has one.

  It is as `optax.inject_hyperparams` keeps it.
  """
  injected = find_states(opt_state, optax.InjectStatefulHyperparamsState).values()
  stated = [rate for state in injected if (rate := state.hyperparams.get("learning_rate")) is not None]
  is_one = len(stated) == 1 and jnp.ndim(stated[0]) == 0
  return {"learning_rate": jnp.asarray(stated[0], jnp.float32)} if is_one else {}


def _owned(tree: PyTree) -> PyTree:
  """Copies a tree, since donation needs buffers without other owners; removes weak types, as steps do."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
  return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else jnp.array(x, dtype=x.dtype), tree)


def _bare(tree: PyTree) -> PyTree:
  """Returns a tree whose dicts are without what is masked, as those of an `nnx.Optimizer` with `wrt`."""
  is_dict = lambda x: isinstance(x, dict)

  def of(x: Any) -> Any:
    parts = {key: of(part) for key, part in x.items()} if is_dict(x) else None
    return x if parts is None else {key: part for key, part in parts.items() if jax.tree.leaves(part)}

  return jax.tree.map(of, tree, is_leaf=is_dict)
