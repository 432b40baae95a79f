"""What a model is: `Task`, a model with its loss; `make_task` makes the task of a config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
from jaxtyping import PRNGKeyArray

from mpjax._types import LossFunction, PyTree
from mpjax.dtypes import platform
from mpjax.policy import Policy
from mpjax.sharding import Dims, ShardingRule, ShardingRules
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import Config
from mpjax.train.config._plugins import place
from mpjax.train.config._registry import MODELS
from mpjax.train.data import DataInfo, MissingFact, ModelInfo


@dataclasses.dataclass(frozen=True)
class Task:
  """A model with its loss. A function registered with `mpjax.train.register_model` returns one.

  ```python
  task = mpjax.train.Task(
    init=lambda key: {"w": jax.random.normal(key, (4, 2))},
    loss_fn=lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
    logits=lambda params, x: x @ params["w"],
    sharding={"w": ("fsdp", None)},
  )
  ```

  Attributes:
    init: takes a PRNG key; returns a tree of parameters, an `nnx.Module`, or `(params, model_state)`.
    loss_fn: a loss function as `mpjax.make_train_step` takes it.
    evaluate: takes what `loss_fn` takes; returns a loss, `(loss, metrics)`, or metrics with a key `loss`. It
      runs under the policy. Over batches, a plain number is averaged with equal weights; an `mpjax.Average`
      is exact. `None`: the loss function is the evaluation.
    logits: `(params, inputs)` to the model's outputs, also with `model_state` if it has that argument. Used
      by exports (`ExportedModel.logits`). It runs under the policy.
    sharding: how parameters are divided over a mesh, as for `make_train_step`: `{regex: axes}` or a function
      of path and shape. An axis that does not divide a dimension is left out.
    units: the unit of speed, and how many units a row has: `("tokens", 128)`.
  """

  init: Callable[[PRNGKeyArray], PyTree]
  loss_fn: LossFunction
  evaluate: LossFunction | None = None
  logits: Callable[..., PyTree] | None = None
  sharding: ShardingRule | Mapping[str, Dims | None] | None = None
  units: tuple[str, int] = ("rows", 1)

  def __post_init__(self) -> None:
    for name in ("init", "loss_fn", "evaluate", "logits"):
      value = getattr(self, name)
      if not callable(value) and (value is not None or name in ("init", "loss_fn")):
        raise TypeError(f"Task({name}=...) is a {type(value).__name__}: expected a function")
    if not (callable(self.sharding) or self.sharding is None or isinstance(self.sharding, Mapping)):
      raise TypeError(
        f"Task(sharding=...) is a {type(self.sharding).__name__}: expected a mapping such as "
        '{".*/kernel": ("fsdp", "tensor")}, or a function of path and shape'
      )
    ShardingRules(model=self.sharding)  # raises for a wrong pattern or axis
    match self.units:
      case (str(), int(count)) if count > 0:
        pass
      case _:
        raise TypeError(f'Task(units={self.units!r}): expected a name and a number, as in ("tokens", 128)')

  def init_arguments(self, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Makes the arguments of `TrainStep.init`: `params`, and `model_state` if the model has one."""
    made = self.init(key)
    if type(made) is tuple and len(made) == 2:  # a NamedTuple is a tree of parameters
      return {"params": made[0], "model_state": made[1]}
    return {"params": made}


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
