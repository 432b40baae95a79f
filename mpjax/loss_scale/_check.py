"""`check_loss_scaling`: whether the loss scale works, in an optimiser, a step or a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._average import is_average
from mpjax._lazy import nnx
from mpjax._types import Array, PyTree
from mpjax.loss_scale._check_optimizer import check_optimizer
from mpjax.loss_scale._check_own_step import (
  check_own_step,
  copied,
  highest_finite,
  lower_scales,
  shrinks,
)
from mpjax.loss_scale._finite import all_finite, is_inexact, unscale
from mpjax.loss_scale._overwritten import hide
from mpjax.loss_scale._own_loops import has_module, value_and_grad
from mpjax.loss_scale._state_access import all_loss_scales, find_loss_scales, with_scale
from mpjax.loss_scale._transform import LossScaleState, first_state
from mpjax.loss_scale._two_scales import scale_dependent
from mpjax.policy import LossScaling

_USAGE = (
  "expected an optimiser and parameters, check_loss_scaling(tx, params); a step that make_train_step made, "
  "check_loss_scaling(step, state, batch); your own step or a loss function with its arguments"
)


@runtime_checkable
class _MadeStep(Protocol):
  """The part of an `mpjax.TrainStep` that this module uses."""

  tx: optax.GradientTransformation

  def gradients(self, state: Any, batch: PyTree) -> tuple[Any, PyTree]:
    """Computes the loss and the unscaled gradients."""


def check_loss_scaling(checked: Any, /, *args: Any, **keywords: Any) -> None:
  """Tries an optimiser, a training step or a loss, and raises if its loss scale does not work.

  ```python
  mpjax.loss_scale.check_loss_scaling(tx, params)  # before the first step
  mpjax.loss_scale.check_loss_scaling(step, state, batch)  # a step from make_train_step
  mpjax.loss_scale.check_loss_scaling(my_step, params, opt_state, batch)
  mpjax.loss_scale.check_loss_scaling(loss_fn, params, batch)
  ```

  - An optimiser gets made-up gradients. Its updates must not depend on the scale, and a gradient that is not
    finite must leave everything as it was. This finds a clip or moments outside the loss scale.
  - Your own step runs with an infinite scale, which must make it skip, and with several others, which must
    give the same parameters and state. This finds gradients of an unscaled loss, as from
    `jax.value_and_grad`: the optimiser divides them by the scale, and parameters stand still.
  - The gradients of a loss function, and of a step from `make_train_step`, must be the same at several
    scales. This finds backward rules that are not linear, such as a clip of cotangents in a
    `jax.custom_vjp`.

  Arguments are copied, never changed or donated. The check takes the time of about twenty steps (for an
  optimiser, two updates for each leaf); it is meant for a test or the start of a script.

  Args:
    checked: an optimiser with a loss scale, a step from `make_train_step`, your own step, or a loss function.
      Your own step takes the state of an optimiser with a loss scale, or an `nnx.Optimizer`. A loss function
      returns the loss, or a tuple that begins with it.
    *args: for an optimiser the parameters; else the arguments of `checked`. A loss is differentiated with
      respect to the first.
    **keywords: for an optimiser, keyword arguments of its `update`; else those of `checked`.

  Raises:
    ValueError: if there is no loss scale, or if it does not work; says what went wrong, where, and what to
      write.
    TypeError: if `checked` is something else.
  """
  if hasattr(checked, "init") and hasattr(checked, "update"):
    check_optimizer(checked, *args, **keywords)
  elif isinstance(checked, _MadeStep) and len(args) == 2:
    _check_made_step(checked, *args, **keywords)
  elif not callable(checked) or not args:
    raise TypeError(f"check_loss_scaling of a {type(checked).__name__} and {len(args)} arguments: {_USAGE}")
  elif any(isinstance(arg, nnx.Optimizer) or find_loss_scales(arg) for arg in (*args, *keywords.values())):
    check_own_step(checked, args, keywords)
  else:
    _check_loss(checked, args, keywords)


def _check_made_step(step: _MadeStep, state: Any, batch: PyTree) -> None:
  all_loss_scales(state.opt_state)
  if not isinstance(state.opt_state, LossScaleState):  # a step puts it outermost
    check_optimizer(step.tx, state.arrays)

  def gradients_at(scale: float) -> PyTree:
    return step.gradients(state.replace(opt_state=with_scale(state.opt_state, scale)), batch)[1]

  _check_gradients(gradients_at)


def _check_loss(fun: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
  @functools.wraps(fun, updated=())
  def loss_alone(*args: Any, **keywords: Any) -> Any:
    out = fun(*args, **keywords)
    loss = out[0] if isinstance(out, tuple) and out else out
    if is_average(loss) or (is_inexact(loss) and jnp.ndim(loss) == 0):
      return loss
    raise ValueError(
      f"{getattr(fun, '__name__', fun)} returned a {type(out).__name__}; expected a floating scalar or a "
      f"tuple that begins with one; and none of its arguments holds a loss scale: {_USAGE}"
    )

  def unscaled(scale: Array, args: tuple[Any, ...], keywords: dict[str, Any]) -> PyTree:
    state = first_state(LossScaling(kind="static"), ())._replace(scale=scale)
    return unscale(value_and_grad(loss_alone, state)(*args, **keywords)[1], scale)

  leaves, structure = jax.tree.flatten((args, keywords))
  arrays = [leaf if isinstance(leaf, (jax.Array, np.ndarray)) else None for leaf in leaves]

  @jax.jit
  def compiled(scale: Array, arrays: list[Array | None]) -> PyTree:
    given = [leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)]
    args, keywords = jax.tree.unflatten(structure, given)
    return unscaled(scale, args, keywords)

  def gradients_at(scale: float) -> PyTree:
    if any(map(has_module, (*args, *keywords.values()))):
      new = copied([*args, *keywords.values()])
      named = dict(zip(keywords, new[len(args) :], strict=True))
      return nnx.as_pure(unscaled(jnp.float32(scale), tuple(new[: len(args)]), named))
    return compiled(jnp.float32(scale), arrays)

  _check_gradients(gradients_at)


def _check_gradients(gradients_at: Callable[[float], PyTree]) -> None:
  scale = highest_finite(lambda scale: bool(all_finite(hide(gradients_at(scale)))))
  near, *far = lower_scales(scale)
  _refuse(scale_dependent(gradients_at, (scale, near)), scale, near)
  for low in far:
    found = scale_dependent(gradients_at, (scale, low))
    _refuse({path: norms for path, norms in found.items() if shrinks(*norms)}, scale, low)


def _refuse(found: dict[str, tuple[float, float]], scale: float, low: float) -> None:
  if not found:
    return
  path, norms = max(found.items(), key=lambda item: max(item[1]))
  others = f", and {len(found) - 1} more" if len(found) > 1 else ""
  raise ValueError(
    f"the gradient of {path or 'the argument'}{others} depends on the loss scale: unscaled, its norm is "
    f"{norms[0]:.3g} at a scale of {scale:g}, and {norms[1]:.3g} at {low:g}. A backward rule is not linear, "
    "such as a clip of cotangents in a custom_vjp, which sees them scaled. mpjax.full_precision does not "
    "change that: in the rule, divide by the scale first and multiply by it last. Or use 'bf16', "
    "which needs no loss scale"
  )
