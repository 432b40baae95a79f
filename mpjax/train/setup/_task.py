"""Makes the task of a config, and names what is wrong with its model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from mpjax.dtypes import platform
from mpjax.policy import Policy
from mpjax.registry._info import DataInfo, MissingFact, ModelInfo
from mpjax.registry._registry import MODELS
from mpjax.registry._task import Task
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import Config
from mpjax.train.config._plugins import place


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
  except (ValueError, MemoryError, OverflowError) as error:  # the last two: sizes do not fit into memory
    text = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError(f"model: {text}{place(error)}") from error
