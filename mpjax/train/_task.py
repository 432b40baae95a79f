"""`Task`: what a model is to a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxtyping import PRNGKeyArray

from mpjax._types import LossFunction, PyTree
from mpjax.patterns import component_regex, named_leaves
from mpjax.sharding import Dims, ShardingRule, ShardingRules


@dataclasses.dataclass(frozen=True)
class Task:
  """A model with its loss, as the function of `mpjax.train.register_model` returns it.

  Attributes:
    init: from a PRNG key to a tree of parameters, an `nnx.Module`, or `(params, model_state)`.
    loss_fn: what `mpjax.make_train_step` takes.
    evaluate: as `loss_fn`, for the rows held out: it returns a loss, `(loss, metrics)`, or metrics with a
      `loss` among them. `None`: the evaluation is the loss. It runs under the policy, too. What it returns as
      an `mpjax.Average` is exact over batches, and a plain number their mean.
    logits: `(params, inputs)`, with `model_state` if it names it, to the model's outputs; for those who
      export the model. It runs under the policy.
    sharding: where parameters lie on a mesh, as `make_train_step` takes it: `{regex: axes}` or a function of
      path and shape. An axis that does not divide a dimension is left out.
    units: what a row of a batch counts, and how many of them it holds: `("tokens", 128)`.
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
      ShardingRules(self.sharding)  # raises for what is no pattern or no axis
    match self.units:
      case (str(), int(count)) if count > 0:
        pass
      case _:
        raise TypeError(f'Task(units={self.units!r}): expected a name and a number, as in ("tokens", 128)')

  def init_arguments(self, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Makes keyword arguments of `TrainStep.init`: `params`, and `model_state` if there is one."""
    made = self.init(key)
    if type(made) is tuple and len(made) == 2:  # a NamedTuple is a tree of parameters
      return {"params": made[0], "model_state": made[1]}
    return {"params": made}

  def check_sharding(self, params: PyTree) -> None:
    """Raises ValueError for a pattern of `sharding` that matches none of the parameters, given as shapes."""
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
