"""Arguments of the numerics tools: a step and its state, or a loss function and its parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from mpjax._calls import require_call
from mpjax._types import PolicyLike, PyTree
from mpjax.numerics._kept_programs import step_for, step_under
from mpjax.policy import get_policy
from mpjax.step import TrainState, TrainStep
from mpjax.step._checks import require_state_and_batch
from mpjax.step._loss import KEYWORDS


def arguments_of(
  tool: str, fun_or_step: TrainStep | Callable[..., Any], args: tuple[PyTree, ...], *, listed: bool = True
) -> tuple[TrainStep | Callable[..., Any], PyTree, PyTree]:
  """Returns the step or loss function, its state or parameters, and the batches.

  A loss function of more than two arguments becomes a function of `(params, batch)`.

  Args:
    tool: the public name of the tool.
    fun_or_step: the step, or the loss function.
    args: the positional arguments after it.
    listed: whether the tool takes a list of batches.

  Raises:
    TypeError: for arguments that the tool does not take; the message shows the right call.
  """
  if isinstance(fun_or_step, TrainStep):
    return fun_or_step, *require_state_and_batch(tool, args)
  if not args or isinstance(args[0], TrainState):
    looked_at = "a TrainState belongs to its step" if args else "no parameters"
    raise TypeError(
      f"mpjax.{tool}: {looked_at}: call mpjax.{tool}(step, state, batch) or (loss_fn, params, batch)"
    )
  require_call(tool, fun_or_step, args, _stand_ins(fun_or_step))
  if len(args) == 2:
    return fun_or_step, *args
  params, *batch = args
  return _of_one_batch(fun_or_step), params, [tuple(batch)] if listed else tuple(batch)


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
  if not callable(target):
    raise ValueError(f"target of type {type(target).__name__}: expected a TrainStep or a loss function")
  resolved = get_policy("auto" if policy is None else policy).without_histories()
  step = step_for(target, tx, resolved.without_devices())
  return step, step.init(state, **init), tx is not None


def _stand_ins(fun: Callable[..., Any]) -> dict[str, None]:
  """Returns the keyword arguments of a loss function that the step fills in, not its caller."""
  if not callable(fun):
    return {}
  try:
    parameters = inspect.signature(fun).parameters
  except (TypeError, ValueError):
    return {}
  return {name: None for name in KEYWORDS if name in parameters}


def _of_one_batch(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a loss function of `(params, batch)` for one that takes the parts of a batch one by one."""

  @functools.wraps(fun)
  def of_batch(params: PyTree, batch: tuple[PyTree, ...], **kwargs: Any) -> Any:
    return fun(params, *batch, **kwargs)

  parameters = [
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("params", "batch")
  ]
  named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _stand_ins(fun)]
  of_batch.__signature__ = inspect.Signature([*parameters, *named])  # type: ignore[attr-defined]
  return of_batch
