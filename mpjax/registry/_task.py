"""What a model's function takes and returns: facts about the data, and a model with its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from mpjax._types import LossFunction, PyTree
from mpjax.policy import Policy
from mpjax.sharding import Dims, ShardingRule, ShardingRules


class MissingFact(AttributeError):
  """A model asks for a fact that the data does not give."""


@dataclasses.dataclass(frozen=True)
class DataInfo:
  """Facts about a dataset.

  The facts that the data's function returned are also attributes and items: `info.num_classes`,
  `info["num_classes"]`.

  Attributes:
    train_examples: number of rows in an epoch.
    eval_examples: number of rows held out.
    fingerprint: changes with the content, the split and the row length; not with the data's location.
    description: one line for a person.
    row: dtype and shape of each array of a row, by name: `{"tokens": ("int32", (129,))}`.
    facts: what the data's function returned as `info`, in plain data.
  """

  train_examples: int
  eval_examples: int
  fingerprint: str
  description: str
  row: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __getattr__(self, name: str) -> Any:
    facts = self.__dict__.get("facts", {})
    if name in facts:
      return tuple(facts[name]) if isinstance(facts[name], list) else facts[name]
    given = ", ".join(sorted(facts)) or "nothing"
    raise MissingFact(f"it needs {name!r}, and the data gives {given}")

  def __getitem__(self, name: str) -> Any:
    return getattr(self, name)

  def __contains__(self, name: object) -> bool:
    return isinstance(name, str) and hasattr(self, name)

  def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of `rows` rows."""
    return {
      name: jax.ShapeDtypeStruct((rows, *shape), np.dtype(dtype)) for name, (dtype, shape) in self.row.items()
    }


@dataclasses.dataclass(frozen=True)
class ModelInfo(DataInfo):
  """The argument `info` of a model's function: facts about the data, and how the run will use the model.

  Attributes:
    policy: the run's policy. A model needs no dtypes of its own; the choice of a kernel may depend on them.
    backend: the platform: `"cpu"`, `"gpu"` or `"tpu"`.
    recompute: the config's `train.recompute`; `"blocks"` asks the model to recompute its blocks.
  """

  policy: Policy = dataclasses.field(kw_only=True)
  backend: str = dataclasses.field(kw_only=True)
  recompute: str = dataclasses.field(kw_only=True)


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
