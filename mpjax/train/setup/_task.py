"""`Task`: a model with its loss, as a training run uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxtyping import PRNGKeyArray

from mpjax._types import LossFunction, PyTree
from mpjax.patterns import component_regex, named_leaves
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
    if isinstance(self.sharding, Mapping):
      ShardingRules(self.sharding)  # raises for a wrong pattern or axis
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

  def check_sharding(self, params: PyTree) -> None:
    """Raises ValueError if a pattern of `sharding` matches no parameter; `params` may be shapes."""
    names = [name for name, _ in named_leaves(params)]
    for pattern in self.sharding if isinstance(self.sharding, Mapping) else ():
      if not any(component_regex(pattern).search(name) for name in names):
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise ValueError(f"sharding pattern {pattern!r} of the Task matches no parameter: there are {shown}")

  @property
  def sharding_rule(self) -> ShardingRule | None:
    """Returns `sharding` as a function of path and shape."""
    if isinstance(self.sharding, Mapping):
      return _first_match(self.sharding)
    return self.sharding


def _first_match(patterns: Mapping[str, Dims | None]) -> ShardingRule:
  def rule(path: str, shape: tuple[int, ...]) -> Dims | None:
    for pattern, dims in patterns.items():
      if component_regex(pattern).search(path) and len(dims or shape) == len(shape):
        return [None] * len(shape) if dims is None else dims
    return None

  return rule
