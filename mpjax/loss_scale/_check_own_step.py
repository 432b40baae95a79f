"""Runs a user's own training step at several loss scales: whether it differentiates the scaled loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._lazy import nnx
from mpjax._types import PyTree
from mpjax.loss_scale._check_optimizer import without_scale
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._state_access import (
  all_loss_scales,
  find_in,
  find_loss_scales,
  map_states,
  refuse_multi_steps_outside,
)
from mpjax.loss_scale._transform import LossScaleState
from mpjax.patterns import named_leaves

# A dynamic scale grows to the highest by itself. At the largest scale with finite gradients, they are
# rounded least, and a clip in a backward rule cuts most of them.
_HIGHEST, _LOWEST = 2.0**24, 2.0**-24
RATIO = 4.0
# Adam's updates have the size of the learning rate, also where gradients underflow to zero. Updates from
# gradients that are not scaled differ by the whole of `RATIO`.
_TOLERANCE = 0.5
_WAY_OUT = (
  "write loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch) instead of "
  "jax.value_and_grad, or mpjax.value_and_grad(loss_fn, optimizer)(model, batch) instead of "
  "nnx.value_and_grad"
)


class _Run(NamedTuple):
  """Outcome of a step: the loss scales that it updated, and each argument's new value, or `None`."""

  scales: list[LossScaleState]
  after: list[PyTree | None]

  @property
  def finite(self) -> list[bool]:
    """Whether each update found its gradients finite."""
    return [bool(np.all(state.grads_finite)) for state in self.scales]


def check_own_step(step: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
  """Raises `ValueError` if a step does not differentiate the loss times the scale in its arguments.

  Args:
    step: a function that takes an optimiser's state, or an `nnx.Optimizer`, which it changes.
    args: its arguments, which are copied for every run.
    keywords: its keyword arguments.
  """
  given = [*args, *keywords.values()]
  for arg in given:
    if isinstance(arg, nnx.Optimizer):
      all_loss_scales(arg)
      refuse_multi_steps_outside(arg.opt_state)
    elif not _is_node(arg):
      refuse_multi_steps_outside(arg)
  before = [_pure(arg) for arg in given]

  def run(scale: float) -> _Run:
    new = [_prepared(arg, scale) for arg in copied(given)]
    # An infinite scale makes infinities on purpose.
    with jax.debug_nans(False), jax.debug_infs(False):
      out = step(*new[: len(args)], **dict(zip(keywords, new[len(args) :], strict=True)))
    holders = [out, *(arg for arg in new if isinstance(arg, nnx.Optimizer))]
    found = [state for holder in holders for state in find_loss_scales(holder).values()]
    updated = [s for s in found if np.any(s.grads_finite) or np.any(np.asarray(s.skipped_steps) > 0)]
    if not updated:
      raise ValueError(
        "the step updates no loss scale: expected a step that returns the new state of its optimiser, or "
        "changes an nnx.Optimizer"
      )
    return _Run(updated, _new_values(before, new, out))

  if any(run(np.inf).finite):
    raise ValueError(
      "gradients do not belong to the scaled loss: they are finite where the loss scale is infinite. The "
      "optimiser divides them by the scale, so that parameters stand still, or Adam's epsilon "
      f"dominates: {_WAY_OUT}. If the step does so already, a backward rule makes infinities finite: check "
      "with mpjax.loss_scale.check_loss_scaling(loss_fn, params, batch)"
    )
  scale = highest_finite(lambda scale: all(run(scale).finite))
  first = run(scale).after
  for low in lower_scales(scale):
    for i, values in enumerate(zip(before, first, run(low).after, strict=True)):
      if not any(value is None for value in values[1:]):
        _compare(f"argument {i}", values, (scale, low))


def highest_finite(is_finite: Callable[[float], bool]) -> float:
  """Returns the largest of some loss scales at which a step's gradients are finite.

  Raises:
    ValueError: if they are not finite at any scale.
  """
  scale = _HIGHEST
  while not is_finite(scale):
    scale /= RATIO
    if scale < _LOWEST:
      raise ValueError(
        f"gradients are not finite at any loss scale from {_HIGHEST:g} to {_LOWEST:g}: mpjax.find_nonfinite "
        "says where they become non-finite"
      )
  return scale


def lower_scales(scale: float) -> list[float]:
  """Returns scales to compare a scale with: the next lower one, its square root, and 1."""
  far = [2.0 ** round(math.log2(scale) / 2), 1.0] if scale > RATIO**2 else []
  return [scale / RATIO, *far]


def shrinks(high: float, low: float) -> bool:
  """Returns whether a norm is smaller at the higher scale, by more than float16 explains.

  float16 loses small gradients at the lower scale. It may round up those that it keeps, to twice their size.
  """
  return high < low / RATIO


def copied(args: list[Any]) -> list[Any]:
  """Returns arguments with their own arrays, which may be donated, and modules that may be changed."""
  copy = lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x
  nodes = [arg for arg in args if _is_node(arg)]
  if nodes:  # all at once: one may be a part of another
    graph, state = nnx.split(nodes)
    nodes = nnx.merge(graph, jax.tree.map(copy, state))
  new = iter(nodes)
  return [next(new) if _is_node(arg) else jax.tree.map(copy, arg) for arg in args]


def _prepared(arg: Any, scale: float) -> Any:
  """Sets every loss scale in an argument, and marks its record so that an update's verdict will show."""
  values = {"scale": scale, "grads_finite": False, "skipped_steps": 0}
  if isinstance(arg, nnx.Optimizer):
    for state in find_in(arg.opt_state, LossScaleState).values():
      for name, value in values.items():
        variable = getattr(state, name)
        variable[...] = jnp.full_like(variable[...], value)
    return arg
  if _is_node(arg):
    return arg
  filled = lambda state: {name: jnp.full_like(getattr(state, name), value) for name, value in values.items()}
  return map_states(arg, lambda state: state._replace(**filled(state)))


def _new_values(before: list[PyTree], handed: list[Any], out: PyTree) -> list[PyTree | None]:
  """Returns each argument as the step changed it in place, or its new value in the output, or `None`."""
  left, new = _parts(out), []
  for old, arg in zip(before, handed, strict=True):
    if _is_node(arg):
      new.append(_pure(arg))
      continue
    fitting = next((i for i, part in enumerate(left) if _form(part) == _form(old)), None)
    new.append(None if fitting is None or not _has_arrays(old) else left.pop(fitting))
  return new


def _parts(out: PyTree, depth: int = 2) -> list[PyTree]:
  """Returns a step's output and its parts."""
  plain = type(out) in (tuple, list, dict) and depth
  parts = (out.values() if isinstance(out, dict) else out) if plain else ()
  return [out, *(inner for part in parts for inner in _parts(part, depth - 1))]


def _form(tree: PyTree) -> tuple[Any, ...]:
  leaves, structure = jax.tree.flatten(tree)
  return structure, [np.shape(leaf) if is_inexact(leaf) else None for leaf in leaves]


def _has_arrays(tree: PyTree) -> bool:
  return any(is_inexact(leaf) and np.ndim(leaf) for leaf in jax.tree.leaves(tree))


def _compare(name: str, values: tuple[PyTree, PyTree, PyTree], scales: tuple[float, float]) -> None:
  """Raises if a value, `(before, at one scale, at the other)`, changes differently at the two scales."""
  leaves = zip(*(named_leaves(without_scale(value)) for value in values), strict=True)
  for (path, old), (_, high), (_, low) in leaves:
    if not is_inexact(old):
      continue
    eps = float(jnp.finfo(jnp.asarray(high).dtype).eps)
    old, high, low = (
      np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else float) for x in (old, high, low)
    )
    norm = lambda x: float(np.linalg.norm(np.ravel(x)))
    changes, apart, rounding = (norm(high - old), norm(low - old)), norm(high - low), 4 * eps * norm(high)
    near = scales[0] <= RATIO * scales[1]
    if apart > _TOLERANCE * max(changes) + rounding and (near or shrinks(*changes)):
      raise ValueError(
        f"{path or 'it'} of {name} depends on the loss scale: the step changes it by {changes[0]:.3g} at a "
        f"scale of {scales[0]:g}, and by {changes[1]:.3g} at {scales[1]:g}. Gradients are unscaled twice, or "
        "a transform reads them scaled: check with mpjax.loss_scale.check_loss_scaling(tx, params). Or a "
        "backward rule is not linear: check with mpjax.loss_scale.check_loss_scaling(loss_fn, params, batch)"
      )


def _is_node(arg: Any) -> bool:
  return isinstance(arg, (nnx.Module, nnx.Optimizer, nnx.Rngs))


def _pure(arg: Any) -> PyTree:
  if isinstance(arg, nnx.Optimizer):
    return nnx.as_pure(arg.opt_state)
  return nnx.as_pure(nnx.state(arg)) if _is_node(arg) else arg
