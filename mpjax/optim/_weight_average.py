"""`average_weights`: an exponential moving average of the weights in the state of an optimiser."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mpjax._calls import require_transform
from mpjax._types import Array, PyTree
from mpjax.dtypes import widen_floating
from mpjax.loss_scale import LossScaleState, find_states, is_inexact
from mpjax.optim._master_weights import MasterWeightsState, join

# What must be outside, so that the average is of master weights and of steps that were taken.
_OUTSIDE = (LossScaleState, MasterWeightsState, optax.MultiStepsState, optax.ApplyIfFiniteState)


class WeightAverageState(NamedTuple):
  """State of `average_weights`.

  Attributes:
    inner_state: the wrapped transform's.
    average: the average of each floating parameter, in float32 or wider; `optax.MaskedNode()` for others.
    updates: i32[]; updates so far.
  """

  inner_state: PyTree
  average: PyTree
  updates: Array


def average_weights(
  inner: optax.GradientTransformation, decay: float = 0.999
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner`, and keeps an exponential moving average of the weights that its updates make.

  ```python
  tx = mpjax.optim.average_weights(optax.adamw(1e-3), 0.999)
  step = mpjax.make_train_step(loss_fn, tx, "bf16")
  state = step.init(params)
  average = mpjax.optim.evaluation_weights(state.params, state.opt_state)
  ```

  Update t = 0, 1, ... moves the average by 1 - min(decay, (1 + t) / (10 + t)) of its way to the new weights,
  the warm-up of TensorFlow's `ExponentialMovingAverage`. The average is float32 whatever the parameters'
  dtype: in bfloat16 it would stand still. `mpjax.quantized_state` leaves it as it is.

  Put this around the whole chain that makes updates: a transform after it would change the weights. Outside
  belong `mpjax.master_weights` (the average is of the master weights), a loss scale or another guard (a
  skipped step leaves the average as it was) and `optax.MultiSteps`. `mpjax.make_train_step` puts what its
  policy needs around it.

  Args:
    inner: any optax transform.
    decay: the share of the average that an update keeps after the warm-up; at least 0, below 1.

  Returns:
    A transform with a `WeightAverageState`. Its `update` needs `params`.

  Raises:
    ValueError: for another decay; by `init`, if `inner` contains what must be outside; by `update`, without
      `params`.
  """
  require_transform("optim.average_weights", inner, "mpjax.optim.average_weights(tx, 0.999)")
  if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
    raise ValueError(f"decay={decay!r}: expected a number of at least 0, below 1")
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> WeightAverageState:
    inner_state = inner.init(params)
    if inside := [kind.__name__ for kind in _OUTSIDE if find_states(inner_state, kind)]:
      raise ValueError(
        f"average_weights around a transform with a {inside[0]}: put that outside, as in "
        "mpjax.dynamic_loss_scale(mpjax.optim.average_weights(tx, decay))"
      )
    # A copy, so that a step can take the buffers of both.
    first = jax.tree.map(lambda p: jnp.array(p, copy=True) if is_inexact(p) else optax.MaskedNode(), params)
    return WeightAverageState(inner_state, widen_floating(first), jnp.zeros([], jnp.int32))

  def update(
    updates: PyTree, state: WeightAverageState, params: PyTree = None, **extra_args: object
  ) -> tuple[PyTree, WeightAverageState]:
    if params is None:
      raise ValueError("update(grads, state) without params: the average is of the parameters")
    updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    share = jnp.maximum(1 - decay, 9 / (10 + state.updates))

    def moved(new: Array, average: Array | optax.MaskedNode) -> Array | optax.MaskedNode:
      return average + share.astype(average.dtype) * (new - average) if is_inexact(average) else average

    new = widen_floating(optax.apply_updates(params, updates))
    average = jax.tree.map(moved, new, state.average)
    return updates, WeightAverageState(inner_state, average, state.updates + 1)

  return optax.GradientTransformationExtraArgs(init, update)


def evaluation_weights(params: PyTree, opt_state: PyTree) -> PyTree:
  """Returns the weights to evaluate and to serve, if the optimiser keeps others than it trains.

  ```python
  tx = mpjax.dynamic_loss_scale(mpjax.optim.average_weights(optax.adamw(1e-3)))
  evaluated = mpjax.optim.evaluation_weights(params, tx.init(params))
  ```

  They are the average of `mpjax.optim.average_weights`, or x of `optax.contrib.schedule_free` (arXiv
  2405.15682) for the master weights; the average under both.

  Args:
    params: tree of parameters.
    opt_state: the optimiser's state for them, in a loop of your own, in a `TrainState`, or as
      `TrainStep.user_state` returns it.

  Returns:
    A tree like `params`, in float32 where there are such weights. Parameters without them are returned as
    they are given.
  """
  free = find_states(opt_state, optax.contrib.ScheduleFreeState).values()
  masters = find_states(opt_state, MasterWeightsState).values() if free else ()
  y = functools.reduce(join, (_of_all(params, state.correction) for state in masters), params)
  for state in free:
    x = lambda p, y, z, b1=state.b1: (y - (1 - b1) * z) / b1 if is_inexact(z) else p
    params = jax.tree.map(x, params, y, _of_all(params, state.z))
  # Several are inside one another, or of different parameters.
  for state in reversed(find_states(opt_state, WeightAverageState).values()):
    average = _of_all(params, state.average)
    params = jax.tree.map(lambda p, average: average if is_inexact(average) else p, params, average)
  return params


def _of_all(params: PyTree, part: PyTree) -> PyTree:
  """Returns a tree like the parameters, with `optax.MaskedNode` for each that an optimiser does not see."""
  leaves = dict(jax.tree_util.tree_leaves_with_path(part))
  return jax.tree_util.tree_map_with_path(lambda path, _: leaves.get(path, optax.MaskedNode()), params)


def keeps_other_weights(opt_state: PyTree) -> bool:
  """Returns whether `evaluation_weights` are other weights than those that the optimiser trains."""
  kinds = (WeightAverageState, optax.contrib.ScheduleFreeState)
  return any(find_states(opt_state, kind) for kind in kinds)
