"""`Task`: a model with its loss, as a training run uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxtyping import PRNGKeyArray

from mpjax._types import LossFunction, PyTree
from mpjax.sharding import Dims, ShardingRule, ShardingRules


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
