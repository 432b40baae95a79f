"""What one can ask of a training step without taking one: other forms, states, gradients, explanations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Float32

from mpjax._average import is_average, worth
from mpjax._types import Array, LossFunction, PolicyLike, PyTree
from mpjax.casting import ExplainedGather, Explanation, explain_as_run
from mpjax.casting._overrides import Overrides
from mpjax.loss_scale import find_scaler, hide, show, unscale
from mpjax.policy import get_policy, matmul_precision
from mpjax.sharding import on_device
from mpjax.step import _checks, _layers
from mpjax.step._layout import Layout
from mpjax.step._loss import Pass, StepLoss
from mpjax.step._mesh_step import gathers, value_and_grad_on_mesh
from mpjax.step._optimizer_arguments import with_step_arguments
from mpjax.step._options import StepOptions
from mpjax.step._static_leaves import whole_of
from mpjax.step._train_state import TrainState
from mpjax.step._trained import Trained, merged, only

_Out = TypeVar("_Out")


class StepViews:
  """A loss function and an optimiser under a policy; `TrainStep` runs them."""

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
    self.needs_batch = Overrides(self.policy, None).has_histories
    self._jitted_gradients = jax.jit(self.loss_and_gradients)
    self._jitted_user_state = jax.jit(self._user_state)

  def _gradient_pass(self, state: TrainState, batch: PyTree) -> Pass:
    """Runs the loss forward and backward over a batch, on one device or the mesh.

    Missing gradients are `optax.MaskedNode`s.
    """
    trained = self.trained.masks(state).read
    if self.layout is not None:
      self.layout.check_batch(batch, self.options.accumulate)
    with matmul_precision(self.policy):
      if self.layout is not None and self.layout.shards > 1:
        out = value_and_grad_on_mesh(self.loss, self.layout, state, batch, trained)
      else:
        params, keys = self.loss.compute_params(state), self.loss.keys(state, batch)
        with contextlib.nullcontext() if self.layout is None else self.layout.in_mesh():
          out = self.loss.value_and_grad(params, state, batch, keys, trained, like=state.arrays)
    return out._replace(
      metrics=jax.tree.map(worth, out.metrics, is_leaf=is_average),
      model_state=merged(out.model_state, state.model_state),
    )

  def _run(self, jitted: Callable[..., Any], state: TrainState, *args: PyTree) -> Any:
    _checks.require_kept(state)
    return jitted(state, *args)

  def _laid(
    self,
    fun: Callable[[TrainState, PyTree], _Out],
    state: TrainState,
    batch: PyTree,
    out: Callable[[TrainState], PyTree],
  ) -> _Out:
    """Calls `fun(state, batch)` with the step's layout; `out` is as in `Layout.run`."""
    return fun(state, batch) if self.layout is None else self.layout.run(fun, state, batch, out)

  def with_policy(self, policy: PolicyLike) -> Self:
    """Returns the same step under another policy; states are alike if optimisers and scales are."""
    options = dataclasses.replace(self.options, policy=get_policy(policy))
    return type(self)(self.fun, self.inner_tx, options)

  def with_layout(self, layout: Layout | None) -> Self:
    """Returns the same step on other devices; `None`: without a mesh, as one program over the whole batch."""
    if layout is self.layout:
      return self
    policy = self.policy if layout is not None else self.policy.without_devices()
    options = dataclasses.replace(self.options, policy=policy, layout=layout)
    return type(self)(self.fun, self.inner_tx, options)

  def without_mesh(self) -> Self:
    """Returns the same step without a mesh."""
    return self.with_layout(None)

  def adopt(self, state: TrainState, before: StepViews, *, warn: bool = True) -> TrainState:
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
      arrays=self.trained.whole(state, params, state.arrays),
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
    return self.trained.whole(state, seen, state.arrays)

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
    params, opt_state = self._run(self._jitted_user_state, state)
    return whole_of(params), opt_state

  def _user_state(self, state: TrainState) -> tuple[PyTree, PyTree]:
    state = on_device(state)
    params, opt_state = _layers.user_state(self.inner_tx, self.trained.parameters(state), self.layers(state))
    # Copies, otherwise `jit` would return buffers that the next step reuses.
    copied = jax.tree.map(jnp.copy, (self.trained.whole(state, params, state.arrays), opt_state))
    state = state.replace(arrays=copied[0], opt_state=copied[1])
    if self.layout is not None:
      state = self.layout.keep(state)
    in_module = state.graphdef is not None
    return self.trained.parameters(state) if in_module else state.arrays, state.opt_state

  def gradients(self, state: TrainState, batch: PyTree) -> tuple[Float32[Array, ""], PyTree]:
    """Computes the unscaled loss and the gradients (unscaled, in float32 or wider) that a step would use.

    For inspection: nothing is updated or donated.
    """
    _checks.require_state(state, batch)
    return self._run(self._jitted_gradients, state, batch)

  def loss_and_gradients(self, state: TrainState, batch: PyTree) -> tuple[Float32[Array, ""], PyTree]:
    """Computes what `gradients` returns, without `jit`, for tracing."""

    def unscaled(state: TrainState, batch: PyTree) -> tuple[Array, PyTree]:
      out, scaler = self._gradient_pass(state, batch), find_scaler(state.opt_state)
      if scaler is None:
        return worth(out.loss), out.grads
      return worth(out.loss), show(out.grads, unscale(hide(out.grads), scaler.scale), out.grads)

    of_read = lambda laid: (PartitionSpec(), only(self.trained.masks(state).read, laid.arrays))
    return self._laid(unscaled, state, batch, of_read)

  def carried(self, state: TrainState, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Computes the new `model_state` and `fp8_state`, also for a skipped step; not jitted."""

    def last(state: TrainState, batch: PyTree) -> tuple[PyTree, PyTree]:
      out = self._gradient_pass(state, batch)
      return out.model_state, out.fp8_state

    return self._laid(last, state, batch, lambda laid: (laid.model_state, laid.fp8_state))

  def explain(self, state: TrainState, batch: PyTree) -> Explanation:
    """Returns what autocast does to the loss function under this policy; see `mpjax.explain`.

    Args:
      state: a state, or its shapes (`jax.eval_shape`).
      batch: a batch, or its shapes.
    """
    _checks.require_state(state, batch)
    args, keywords = self.loss.arguments(state, batch)
    recompute = self.options.recompute
    explanation = explain_as_run(self.fun, args, keywords, self.policy, recompute=recompute)
    if self.layout is None or self.layout.shards == 1:
      return explanation
    found = gathers(self.loss, self.layout, state, batch)
    return dataclasses.replace(explanation, gathers=tuple(ExplainedGather(*row) for row in found))

  def _explain_(self, *args: Any, policy: PolicyLike | None) -> Explanation:
    """Implements `mpjax.explain(step, state, batch)`."""
    state, batch = _checks.require_state_and_batch("explain", args)
    if policy is None:
      return self.explain(state, batch)
    other = self.with_policy(get_policy(policy).without_histories())
    return other.explain(jax.eval_shape(lambda s: other.adopt(s, self, warn=False), state), batch)
