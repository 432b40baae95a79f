"""`make_train_step`: one jitted, donated training step with a policy applied.

The state is one pytree (`TrainState`), so it is checkpointed, sharded and donated as a whole; the loss
function is the user's, and so is the model: a parameter tree, linen variables or an `nnx.Module`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._lazy import nnx
from mpjax.casting._autocast import init_fp8_state, require_recompute
from mpjax.casting._explain import Explanation, explain
from mpjax.casting._overrides import Overrides
from mpjax.fp8._delayed import grow_gradients
from mpjax.loss_scale._finite import unscale
from mpjax.loss_scale._overwritten import apply_updates, hide, show
from mpjax.loss_scale._state_access import get_loss_scale
from mpjax.policy import Policy, get_policy, matmul_precision
from mpjax.sharding._mesh import check_mesh
from mpjax.sharding._sharding_rules import Rule, Rules
from mpjax.step._checks import check_differentiable
from mpjax.step._loss import Metrics, StepLoss
from mpjax.step._mesh_step import Layout
from mpjax.step._micro_batches import split_batch
from mpjax.step._optimizer import adopt_opt_state, find_scaler, require_honoured, with_policy
from mpjax.step._train_state import TrainState


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  policy: Any = "auto",
  *,
  accumulate: int = 1,
  skip_nonfinite: bool = False,
  cast_batch: bool = True,
  donate: bool = True,
  wrt: Any = None,
  recompute: str = "islands",
  mesh: Any = None,
  sharding: Mapping[str, Any] | Rule | Rules | None = None,
) -> TrainStep:
  """One jitted training step: casting, loss scaling, accumulation, the update and metrics.

  `loss_fn(params, batch)` returns the loss (floating []), or `(loss, metrics)` with a dict of arrays, or
  `(loss, metrics, model_state)` when it takes `model_state`. It takes more arguments by keyword if its
  signature names them: `model_state`; and either `rng`, a fresh key for each step, micro-batch and part of a
  batch, or `row_rngs`, a fresh key for each row of the batch, with which results do not depend on how rows
  are divided. For an `nnx.Module`, `params` is the module itself, and what it mutates (BatchNorm statistics)
  is kept.

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
    wrt: filter for the variables of an `nnx.Module` that are trained; by default `nnx.Param`.
    recompute: what the backward pass computes again instead of keeping it: as `mpjax.autocast` takes it;
      without autocast `"dots"` keeps the results of matrix products alone, and the others change nothing.
    mesh: devices with axes among `data`, `fsdp` and `tensor`. Each device runs `loss_fn` on its rows of the
      batch, which are divided over `data` and `fsdp`, as micro-batches are: losses, floating metrics and
      model state are averaged, integer metrics summed (`mpjax.batch_axes` is for statistics over all rows).
      Gradients are reduced once a step, in the policy's `reduce_dtype`; parameters and the optimiser's state
      are divided over `fsdp`, and gathered in the compute dtype where nothing reads them in a wider one.
      Without a mesh, arrays that are sharded are left to the compiler.
    sharding: where parameters lie on the mesh: axes by regular expression on the parameter's path, as in
      `{".*/kernel": ("fsdp", "tensor")}`, or a function of path and shape; what they say nothing of has its
      largest dimension over `fsdp`.

  Returns:
    A `TrainStep`: `state = step.init(params)`, then `state, metrics = step(state, batch)`; or, with an
    `nnx.Optimizer(model, step.tx, wrt=...)`, `metrics = step(model, optimizer, batch)` in place.

  Raises:
    ValueError: if the policy is not understood, asks for something that this step does not do, or
      `accumulate` is not a positive integer.
  """
  return TrainStep(
    loss_fn,
    tx,
    policy,
    accumulate,
    skip_nonfinite,
    cast_batch,
    donate,
    nnx.Param if wrt is None else wrt,
    recompute,
    mesh,
    sharding,
  )


class TrainStep:
  """What `make_train_step` returns.

  Attributes:
    policy: the `Policy` in force.
    tx: the optimiser with the policy's loss scaling round it.
    accumulate: number of micro-batches.
    loss: the loss function under the policy.
    layout: where state and batches lie on the mesh; `None` without one.
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
    mesh: Any,
    sharding: Any,
  ):
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
      raise ValueError(f"accumulate={accumulate!r}: expected a positive integer")
    self.policy = get_policy(policy)
    require_honoured(self.policy, over_devices=mesh is not None)
    self.layout = _layout(mesh, sharding, self.policy)
    self.tx = with_policy(tx, self.policy, skip_nonfinite, branch_on_cpu=mesh is None)
    self.jitted = jax.jit(self._step, donate_argnums=(0,) if donate else ())
    self._jitted_gradients = jax.jit(self._loss_and_gradients)
    self.needs_batch = any(recipe.recipe == "delayed" for recipe in Overrides(self.policy, None).recipes)
    self.accumulate = accumulate
    self._wrt = wrt
    self.loss = StepLoss(
      loss_fn,
      self.policy,
      accumulate=accumulate,
      cast_batch=cast_batch,
      wrt=wrt,
      recompute=require_recompute(recompute),
    )
    self._made_with = (tx, accumulate, skip_nonfinite, cast_batch, donate, wrt, recompute, mesh, sharding)

  def init(
    self, params: Any, *, model_state: Any = None, rng: jax.Array | None = None, batch: Any = None
  ) -> TrainState:
    """The first state; `params` (a tree or an `nnx.Module`) is cast to `param_dtype`.

    Args:
      params: tree of parameters, or an `nnx.Module`.
      model_state: what the model carries besides, for a parameter tree.
      rng: key for `loss_fn`'s `rng` or `row_rngs`.
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
      if model_state is not None or "model_state" in self.loss.keywords:
        raise ValueError("an nnx.Module carries its own state: loss_fn takes no model_state beside it")
      graphdef, params, model_state = nnx.split(params, self._wrt, ...)
      params, model_state = nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)
    random = "row_rngs" if self.loss.by_row else "rng"
    given = ((random, "rng", rng), ("model_state", "model_state", model_state if graphdef is None else None))
    for name, argument, value in given:
      if (name in self.loss.keywords) != (value is not None):
        verb = "takes" if name in self.loss.keywords else "does not take"
        raise ValueError(
          f"loss_fn {verb} {name!r} but init was {'not ' if value is None else ''}given one: "
          f"name {name!r} in the signature of loss_fn and pass step.init(..., {argument}=...)"
        )
    check_differentiable(params)
    params = self.policy.cast_to_param(params)
    own = lambda tree: jax.tree.map(_own, tree)
    state = TrainState(
      step=jnp.zeros([], jnp.int32),
      params=own(params),
      model_state=own({} if model_state is None else model_state),
      opt_state=own(self.tx.init(params)),
      rng=None if rng is None else jnp.copy(rng),
      graphdef=graphdef,
    )
    if self.needs_batch:
      state = state.replace(fp8_state=self._init_fp8(state, batch))
    return state if self.layout is None else self.layout.place(state)

  def _init_fp8(self, state: TrainState, batch: Any) -> Any:
    parts = self.accumulate * (1 if self.layout is None else self.layout.shards)
    if parts > 1:
      first = lambda batch: jax.tree.map(lambda x: split_batch(parts, x)[0], batch)
      batch = jax.eval_shape(first, batch)
    args, keywords = self.loss.arguments(state, batch)
    return init_fp8_state(self.loss.fun, self.loss.autocast_policy)(*args, **keywords)

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
    return TrainStep(self.loss.fun, tx, policy, *rest)

  def without_mesh(self) -> TrainStep:
    """The same step as one program over the whole batch, in which nothing is divided or reduced by itself."""
    if self.layout is None:
      return self
    tx, *rest = self._made_with
    policy = dataclasses.replace(self.policy, reduce_dtype=None)
    return TrainStep(self.loss.fun, tx, policy, *(*rest[:-2], None, None))

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

  def explain(self, state: TrainState, batch: Any) -> Explanation:
    """What autocast does to the loss function under this policy; see `mpjax.explain`.

    Args:
      state: a state, or its shapes (`jax.eval_shape`).
      batch: a batch, or its shapes.
    """
    args, keywords = self.loss.arguments(state, batch)
    return explain(self.loss.fun, self.policy)(*args, **keywords)

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
      rng=None if rng is None else jnp.copy(rng),  # the state's buffers are given away
      graphdef=graphdef,
    )
    if self.layout is not None:
      state = self.layout.place(state)
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
    return state if self.layout is None else self.layout.keep(state), metrics

  def _gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Metrics, Any, Any, Any]:
    """Loss and metrics averaged over the batch, gradients of the scaled loss, new model and FP8 state."""
    params = self.loss.compute_params(state)
    if self.layout is not None:
      self.layout.check_batch(batch, self.accumulate)
      if self.layout.shards > 1:
        return self.layout.gradients(self.loss, params, state, batch)
    return self.loss.gradients(params, state, batch, self.loss.keys(state, batch), dtypes=state.params)


def _own(x: Any) -> jax.Array:
  """A copy, since donation needs buffers that nobody else holds; as a second step would give it back."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
  return jnp.copy(x) if is_key else jnp.array(x, dtype=x.dtype)  # which takes a weak type away


def _layout(mesh: Any, sharding: Any, policy: Policy) -> Layout | None:
  if mesh is None:
    if sharding is not None:
      raise ValueError("sharding says where parameters lie on a mesh: pass mesh=, too")
    return None
  rules = sharding if isinstance(sharding, Rules) else None
  if rules is None:
    rules = Rules(model=sharding) if callable(sharding) else Rules(sharding)
  return Layout(check_mesh(mesh), rules, policy.reduce_dtype)
