"""Arguments of the numerics tools: a step and its state, or a loss function and its parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from mpjax._calls import refuse_keywords, require_call
from mpjax._own_autocast import own_autocast, require_no_autocast
from mpjax._types import PolicyLike, PyTree
from mpjax.numerics._pass import step_under
from mpjax.policy import get_policy
from mpjax.sharding import check_mesh, has_explicit_axes
from mpjax.step import KEYWORDS, TrainState, TrainStep, make_train_step, require_state_and_batch

_LINEN = (
  "mpjax.{tool}(loss_fn, variables['params'], batch{how}) with def loss_fn(params, batch): "
  "logits = model.apply({{'params': params}}, batch['x']); ..."
)
_KEYWORDS = {
  "dtype compute_dtype precision": "pass policy='bf16'",
  "pieces": "leave it out: it looks at as many rows of a batch as fit",
}
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


class Arguments(NamedTuple):
  """What a tool looks at.

  Attributes:
    fun_or_step: a step, or a loss function of `(params, batch)`.
    state: the state, or the parameters.
    batches: the batches.
    policy: the policy to run under; `None` for the step's own.
    names: the names of the batch's parts where they are arguments of a loss function; else empty.
  """

  fun_or_step: TrainStep | Callable[..., Any]
  state: PyTree
  batches: PyTree
  policy: PolicyLike | None
  names: tuple[str, ...] = ()


def arguments_of(
  tool: Callable[..., Any],
  fun_or_step: TrainStep | Callable[..., Any],
  args: tuple[PyTree, ...],
  policy: PolicyLike | None,
  init: Mapping[str, Any],
  *,
  listed: bool = True,
  scaled: bool = False,
) -> Arguments:
  """Returns what a tool looks at.

  A loss function of more than two arguments becomes a function of `(params, batch)`. A loss function with an
  autocast of its own becomes the function inside and its policy, so that it can run in float32, too.

  Args:
    tool: the tool.
    fun_or_step: the step, or the loss function.
    args: the positional arguments after it.
    policy: the policy that the tool was given.
    init: keyword arguments for `TrainStep.init`.
    listed: whether the tool takes a list of batches.
    scaled: whether a loss function with an autocast of its own is scaled as its policy says.

  Raises:
    TypeError: for arguments that the tool does not take; the message shows the right call.
    ValueError: for a policy with a loss function that has an autocast of its own.
  """
  name = tool.__name__
  others = {key: value for key, value in init.items() if key not in ("rng", "model_state", "batch")}
  refuse_keywords(tool, others, _KEYWORDS)
  if isinstance(fun_or_step, TrainStep):
    return Arguments(fun_or_step, *require_state_and_batch(name, args), policy)
  if not args or isinstance(args[0], TrainState):
    looked_at = "a TrainState belongs to its step" if args else "no parameters"
    raise TypeError(
      f"mpjax.{name}: {looked_at}: call mpjax.{name}(step, state, batch) or (loss_fn, params, batch)"
    )
  require_call(name, fun_or_step, args, _stand_ins(fun_or_step), linen=_LINEN)
  fun, policy = _without_own_autocast(fun_or_step, policy, scaled)
  if len(args) == 2:
    return Arguments(fun, *args, policy)
  params, *parts = args
  is_array = [any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(part)) for part in parts]
  batch = tuple(part for part, traced in zip(parts, is_array, strict=True) if traced)
  names = tuple(name for name, traced in zip(_names(fun, len(parts)), is_array, strict=True) if traced)
  static = tuple((not traced, None if traced else part) for part, traced in zip(parts, is_array, strict=True))
  return Arguments(_of_one_batch(fun, static), params, [batch] if listed else batch, policy, names)


def _without_own_autocast(
  fun: Callable[..., Any], policy: PolicyLike | None, scaled: bool
) -> tuple[Callable[..., Any], PolicyLike | None]:
  """Returns the function inside a function that `autocast` returned, and its policy; others as they are."""
  own = own_autocast(fun)
  if own is None:
    return fun, policy
  if policy is not None:
    require_no_autocast(fun, get_policy(policy))
  inner = get_policy(own.policy)
  if own.ops is not None or own.overrides or inner.param_dtype != np.float32:
    return fun, policy
  scaling = inner.loss_scaling if scaled else None
  return own.fun, dataclasses.replace(inner, autocast=True, loss_scaling=scaling)


def step_of(
  target: TrainStep | Callable[..., Any],
  state: PyTree,
  policy: PolicyLike | None,
  tx: optax.GradientTransformation | None,
  init: Mapping[str, Any],
) -> tuple[TrainStep, TrainState, bool]:
  """Returns the step, its state, and whether it has an optimiser whose updates can be inspected."""
  if isinstance(target, TrainStep):
    if tx is not None or init:
      given = ", ".join([*(["tx"] if tx is not None else []), *init])
      raise ValueError(f"{given} with a TrainStep, which has its own: pass it to make_train_step")
    if policy is None:
      return target, state, True
    other = step_under(target, get_policy(policy).without_histories())
    return other, other.adopt(state, target, warn=False), True
  resolved = get_policy("auto" if policy is None else policy).without_histories()
  step = make_train_step(target, optax.identity() if tx is None else tx, resolved.without_devices())
  return step, step.init(state, **init), tx is not None


@contextlib.contextmanager
def on_axes_of(step: TrainStep | Callable[..., Any]) -> Iterator[Callable[[PyTree], PyTree]]:
  """Leaves `jax.set_mesh`; yields what puts a tree on the axes of a step's mesh, which the compiler divides.

  Without a mesh, a step or a loss function keeps explicit axes: it may say how its products are divided.
  """
  if not isinstance(step, TrainStep) or step.layout is None:
    yield lambda tree: tree
    return
  with jax.set_mesh(_NO_MESH):
    yield lambda tree: jax.tree.map(_on_auto_axes, tree)


def _on_auto_axes(x: Any) -> Any:
  at = getattr(x, "sharding", None)
  if not isinstance(at, NamedSharding) or not has_explicit_axes(at.mesh):
    return x
  return jax.device_put(x, NamedSharding(check_mesh(at.mesh), at.spec, memory_kind=at.memory_kind))


def _parameters(fun: Callable[..., Any]) -> list[str]:
  """Returns the names of a function's arguments; none if they are not known."""
  try:
    return list(inspect.signature(fun).parameters)
  except (TypeError, ValueError):
    return []


def _stand_ins(fun: Callable[..., Any]) -> dict[str, None]:
  """Returns the keyword arguments of a loss function that the step fills in, not its caller."""
  return dict.fromkeys(name for name in KEYWORDS if name in _parameters(fun))


def _names(fun: Callable[..., Any], count: int) -> list[str]:
  """Returns the names of a function's arguments after the first."""
  found = _parameters(fun)[1 : count + 1]
  return found + [f"argument {i + 2}" for i in range(len(found), count)]


def _of_one_batch(fun: Callable[..., Any], static: tuple[tuple[bool, Any], ...]) -> Callable[..., Any]:
  """Returns a function of `(params, batch)`.

  Args:
    fun: a loss function that takes the parts of a batch one by one.
    static: for each part whether it is not an array, and then the part.
  """

  def of_batch(params: PyTree, batch: tuple[PyTree, ...], **kwargs: Any) -> Any:
    arrays = iter(batch)
    return fun(params, *(part if is_static else next(arrays) for is_static, part in static), **kwargs)

  kinds = inspect.Parameter
  parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("params", "batch")]
  named = [kinds(name, kinds.KEYWORD_ONLY) for name in _stand_ins(fun)]
  of_batch.__signature__ = inspect.Signature([*parameters, *named])  # type: ignore[attr-defined]
  of_batch.__name__ = of_batch.__qualname__ = getattr(fun, "__name__", "loss_fn")
  return of_batch
