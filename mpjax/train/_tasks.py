"""The task of a config, and its model under a policy: evaluation and logits, the same for every model."""

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
from mpjax.train._config import Config
from mpjax.train._errors import ConfigError
from mpjax.train._plugins import place
from mpjax.train._registry import MODELS
from mpjax.train._task import Task
from mpjax.train.data import DataInfo, MissingFact, ModelInfo


def make_task(config: Config, info: DataInfo, policy: Policy, *, backend: str | None = None) -> Task:
  """Makes the task of a config and a dataset, for this machine's backend or another.

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
    jax.eval_shape(lambda: (task.init(jax.random.key(0)), None)[1])  # a module is no result
  return task


@contextlib.contextmanager
def model_errors(config: Config, info: DataInfo) -> Iterator[None]:
  """Turns a ValueError of a model, or of a step about it, into a `ConfigError`, with the line it comes from.

  So it does with a fact that the model asks for and the data does not give.

  Others, such as the TypeError of a product of shapes that do not fit, are a model's own faults: whoever
  mends them wants the traceback.
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
  ) as error:  # sizes for which NumPy has no room are a config's
    text = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError(f"model: {text}{place(error)}") from error


def evaluate(
  task: Task, policy: Policy, state: TrainState, batch: PyTree
) -> dict[str, Float32[Array, ""] | Average]:
  """Computes means over a batch under the policy: `eval_loss`, and what the task gives beside it.

  Means are f32[]; an `Average` stays one, with a total f32[] and its count as it is: `mean_of_batches` of
  several batches is exact then.

  Delayed FP8 scaling takes its histories from the state; one without them has a scale for each tensor.

  Raises:
    ValueError: for an evaluation that returns something else than a loss, with or without metrics.
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
  """Returns the mean over batches of what `evaluate` has given for each of them; waits for it.

  Of averages it is the sum of totals over the sum of counts, without batches that count nothing, and NaN if
  none counts; of plain means their mean, as if each batch counted the same.

  Args:
    values: of one metric, one a batch.
  """
  on_host = jax.device_get(list(values))
  pairs = [(each.total, each.count) if isinstance(each, Average) else (each, 1) for each in on_host]
  totals, counts = np.array([pair for pair in pairs if pair[1]], np.float64).reshape(-1, 2).T
  with np.errstate(invalid="ignore"):  # infinities of both signs
    return float(totals.sum() / counts.sum()) if len(counts) else math.nan


def apply(
  fun: Callable[..., PyTree], policy: Policy, state: TrainState, batch: PyTree, key: Array | None = None
) -> PyTree:
  """Computes a function of a state's model and a batch (or other inputs) under a policy.

  Args:
    fun: takes the parameters or the `nnx.Module`, the batch, and by keyword what it names of `model_state`,
      `rng` and `row_rngs`.
    policy: in whose `output_dtype` floating results come out.
    state: with the master weights.
    batch: arrays.
    key: for `rng` and `row_rngs`; the same one always by default.
  """
  names = inspect.signature(fun).parameters
  keywords: dict[str, PyTree] = {"model_state": state.model_state} if "model_state" in names else {}
  key = jax.random.key(0) if key is None else key
  if "rng" in names:
    keywords["rng"] = key
  if "row_rngs" in names:
    keywords["row_rngs"] = row_keys(key, row_count(batch))
  if policy.autocast:
    # A module goes in as itself, which gives its parts their paths.
    model = state.params if state.graphdef is None else state.model
    policy = policy if state.fp8_state else policy.without_histories()
    return autocast(fun, policy, fp8_state=state.fp8_state or None)(model, batch, **keywords)
  with matmul_precision(policy):
    cast = state.replace(params=policy.cast_to_compute(state.params))
    model = cast.params if cast.graphdef is None else cast.model
    return policy.cast_to_output(fun(model, policy.cast_to_compute(batch), **keywords))
