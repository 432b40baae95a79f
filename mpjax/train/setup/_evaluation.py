"""Evaluates a run's state: the weights to evaluate, metrics of a batch, and their means over batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from mpjax._average import Average
from mpjax._types import Array, ArrayLike, PyTree
from mpjax.casting import autocast
from mpjax.optim import evaluation_weights, keeps_other_weights
from mpjax.policy import Policy, matmul_precision
from mpjax.registry._task import Task
from mpjax.sharding import on_device
from mpjax.step import TrainState, TrainStep, merged, row_count, row_keys, state_of, unrounded


def for_evaluation(step: TrainStep, state: TrainState) -> TrainState:
  """Returns a state with the weights to evaluate, without the parts that no evaluation reads."""
  return state.replace(arrays=weights_of(step, state), opt_state={}, rng=None)


def weights_of(
  step: TrainStep, state: TrainState, which: str = "average", *, masters: bool = False
) -> PyTree:
  """Returns the weights of a run's state, on the devices.

  Args:
    step: the step of the run.
    state: the state.
    which: `"last"`, those that the run trains; `"average"`, those of `mpjax.optim.evaluation_weights`, which
      are the last if the optimiser keeps no others.
    masters: in float32, in place of the policy's `param_dtype`.
  """
  is_other = which == "average" and keeps_other_weights(state.opt_state)
  if not (is_other or masters):
    return state.arrays
  state = on_device(state)
  weights, layers = unrounded(step.trained.parameters(state), step.layers(state))
  if is_other:
    weights = evaluation_weights(weights, state_of(layers))
  return merged(weights if masters else step.policy.cast_to_param(weights), state.arrays)


def evaluate(
  task: Task, policy: Policy, state: TrainState, batch: PyTree
) -> dict[str, Float32[Array, ""] | Average]:
  """Computes `eval_loss` and the task's other metrics for a batch, under the policy.

  Means are float32[]. An `Average` stays one, with a float32[] total and its count unchanged, so that
  `mean_of_batches` is exact.

  Delayed FP8 scaling takes its histories from the state; without them, each tensor is scaled by its own amax.

  Raises:
    ValueError: if the evaluation does not return a loss, with or without metrics.
  """
  fun = task.evaluate or task.loss_fn
  out = apply(fun, policy.with_output_dtype(jnp.float32), state, batch)
  if isinstance(out, dict):
    metrics = dict(out)
  else:
    loss, *rest = out if isinstance(out, tuple) else (out,)
    metrics = {"loss": loss, **(rest[0] if rest else {})}
  named = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
  if "eval_loss" not in named:
    raise ValueError(f"evaluate returned {', '.join(named) or 'nothing'}: expected a loss among the metrics")
  return {name: _in_float32(value) for name, value in named.items()}


def _in_float32(value: ArrayLike | Average) -> Float32[Array, ""] | Average:
  if isinstance(value, Average):
    return Average(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.count))
  return jnp.asarray(value, jnp.float32)


def mean_of_batches(values: Sequence[Array | Average]) -> float:
  """Returns the mean over batches of one metric that `evaluate` computed; waits for the values.

  The mean of averages is the sum of totals over the sum of counts; batches with count 0 are left out, and the
  result is NaN if all counts are 0. Plain means are averaged with equal weights.

  Args:
    values: the metric's value for each batch.
  """
  on_host = jax.device_get(list(values))
  pairs = [(each.total, each.count) if isinstance(each, Average) else (each, 1) for each in on_host]
  totals, counts = np.array([pair for pair in pairs if pair[1]], np.float64).reshape(-1, 2).T
  with np.errstate(invalid="ignore"):  # infinities of both signs
    return float(totals.sum() / counts.sum()) if len(counts) else math.nan


def apply(
  fun: Callable[..., PyTree], policy: Policy, state: TrainState, batch: PyTree, key: Array | None = None
) -> PyTree:
  """Applies a function to a state's model and a batch (or other inputs) under a policy.

  Args:
    fun: takes the parameters or the `nnx.Module`, the batch, and those of the keywords `model_state`, `rng`
      and `row_rngs` that it names.
    policy: the policy; floating results have its `output_dtype`.
    state: a state with the master weights.
    batch: arrays.
    key: the key for `rng` and `row_rngs`; by default a fixed one.
  """
  names = inspect.signature(fun).parameters
  keywords: dict[str, PyTree] = {"model_state": state.model_state} if "model_state" in names else {}
  key = jax.random.key(0) if key is None else key
  if "rng" in names:
    keywords["rng"] = key
  if "row_rngs" in names:
    keywords["row_rngs"] = row_keys(key, row_count(batch))
  if policy.autocast:
    # Passed as a module, so that its parts have their paths.
    model = state.params if state.graphdef is None else state.model
    policy = policy if state.fp8_state else policy.without_histories()
    return autocast(fun, policy, fp8_state=state.fp8_state or None)(model, batch, **keywords)
  with matmul_precision(policy):
    cast = state.replace(params=policy.cast_to_compute(state.params))
    model = cast.params if cast.graphdef is None else cast.model
    return policy.cast_to_output(fun(model, policy.cast_to_compute(batch), **keywords))
