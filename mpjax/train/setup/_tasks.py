"""Makes the task of a config, and runs a task's evaluation and logits under a policy."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from mpjax._average import Average
from mpjax._types import Array, ArrayLike, PyTree
from mpjax.casting import autocast
from mpjax.dtypes import platform
from mpjax.policy import Policy, matmul_precision
from mpjax.step import TrainState
from mpjax.step._loss import row_count, row_keys
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import Config
from mpjax.train.config._plugins import place
from mpjax.train.config._registry import MODELS
from mpjax.train.data import DataInfo, MissingFact, ModelInfo
from mpjax.train.setup._task import Task


def make_task(config: Config, info: DataInfo, policy: Policy, *, backend: str | None = None) -> Task:
  """Makes the task of a config.

  ```python
  config = mpjax.train.load_config("vit_digits")
  setup = mpjax.train.make_setup(config)
  task = mpjax.train.make_task(config, setup.info, setup.policy)
  params, model_state = task.init(jax.random.key(0))
  ```

  Args:
    config: the config; `model` is the section that is used.
    info: facts about the data.
    policy: the policy, which the model's function is told.
    backend: the platform, `"cpu"`, `"gpu"` or `"tpu"`; by default this machine's.

  Raises:
    ConfigError: if the model does not take such data, or its sizes do not fit together.
  """
  kind = MODELS.find(config.model.kind)
  facts = {field.name: getattr(info, field.name) for field in dataclasses.fields(DataInfo)}
  told = ModelInfo(**facts, policy=policy, backend=platform(backend), recompute=config.train.recompute)
  with model_errors(config, info):
    task = kind.fun(told, **config.model.options)
    if not isinstance(task, Task):
      raise ValueError(f"{kind.fun.__name__} returned a {type(task).__name__}: expected a mpjax.train.Task")
    jax.eval_shape(lambda: (task.init(jax.random.key(0)), None)[1])  # a module cannot be a result
  return task


@contextlib.contextmanager
def model_errors(config: Config, info: DataInfo) -> Iterator[None]:
  """Turns a ValueError of a model, or of its training step, into a `ConfigError` that names the line.

  Also turns a fact that the model asks for and the data does not give into a `ConfigError`.

  Other errors, such as the TypeError of a product of unequal shapes, are faults of the model's code: their
  traceback is needed to fix them.
  """
  try:
    yield
  except ConfigError:
    raise
  except MissingFact as error:
    raise ConfigError(
      f"model.kind={config.model.kind} does not take the data of data.kind={config.data.kind}, rows of "
      f"{', '.join(info.row) or 'nothing'}: {error}"
    ) from error
  except (
    ValueError,
    MemoryError,
    OverflowError,
  ) as error:  # the config's sizes do not fit into memory
    text = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError(f"model: {text}{place(error)}") from error


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
