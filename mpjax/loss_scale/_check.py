"""`check_loss_scaling`: whether the loss scale works, in an optimiser, a step or a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._average import is_average
from mpjax._lazy import nnx
from mpjax._types import Array, PyTree
from mpjax.dtypes import widen_floating
from mpjax.loss_scale._check_optimizer import check_optimizer
from mpjax.loss_scale._guard import all_finite, is_inexact, unscale
from mpjax.loss_scale._overwritten import hide
from mpjax.loss_scale._own_loops import value_and_grad
from mpjax.loss_scale._state_access import (
  all_loss_scales,
  find_loss_scales,
  map_states,
  refuse_multi_steps_outside,
  with_scale,
)
from mpjax.loss_scale._transform import LossScaleState, first_state
from mpjax.patterns import named_leaves
from mpjax.policy import LossScaling

# A dynamic scale grows to the highest by itself. At the largest scale with finite gradients, they are
# rounded least, and a clip in a backward rule cuts most of them.
_HIGHEST, _LOWEST = 2.0**24, 2.0**-24
_RATIO = 4.0
# The norm of a leaf's difference, as a part of its norm; and what is rounding noise around 0, of the largest.
_TOLERANCE, _ROUNDING = 0.05, 1e-6
_USAGE = (
  "expected an optimiser and parameters, check_loss_scaling(tx, params); a step that make_train_step made, "
  "check_loss_scaling(step, state, batch); your own step or a loss function with its arguments"
)


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
  - Your own step runs with an infinite scale, which must make it skip. This finds gradients of an unscaled
    loss, as from `jax.value_and_grad`: the optimiser divides them by the scale, and parameters stand still.
    Check its optimiser and its loss function, too.
  - The gradients of a loss function, and of a step from `make_train_step`, must be the same at every
    scale. This finds backward rules that are not linear, such as a clip of cotangents in a `jax.custom_vjp`.

  Arguments are copied, never changed or donated. The check takes the time of a few steps (for an optimiser,
  a few updates for each leaf); it is meant for a test or the start of a script.

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
  elif hasattr(checked, "tx") and hasattr(checked, "gradients") and len(args) == 2:
    _check_made_step(checked, *args, **keywords)
  elif not callable(checked) or not args:
    raise TypeError(f"check_loss_scaling of a {type(checked).__name__} and {len(args)} arguments: {_USAGE}")
  elif any(isinstance(arg, nnx.Optimizer) or find_loss_scales(arg) for arg in (*args, *keywords.values())):
    _check_own_step(checked, args, keywords)
  else:
    _check_loss(checked, args, keywords)


def _check_made_step(step: Any, state: Any, batch: PyTree) -> None:
  all_loss_scales(state.opt_state)
  if not isinstance(state.opt_state, LossScaleState):  # a step puts it outermost
    check_optimizer(step.tx, state.arrays)

  at = lambda scale: state.replace(opt_state=with_scale(state.opt_state, scale))
  _check_gradients(lambda scale: step.gradients(at(scale), batch)[1])


def _check_own_step(step: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
  arrays, together = _taken_apart([*args, *keywords.values()])
  new = together([jnp.copy(x) if isinstance(x, jax.Array) else x for x in arrays])
  optimizers = [arg for arg in new if isinstance(arg, nnx.Optimizer)]
  for optimizer in optimizers:
    all_loss_scales(optimizer)
    optimizer.opt_state = _at_infinity(optimizer.opt_state)
  new = [arg if _is_node(arg) else _at_infinity(arg) for arg in new]
  # The scale makes infinities on purpose.
  with jax.debug_nans(False), jax.debug_infs(False):
    out = step(*new[: len(args)], **dict(zip(keywords, new[len(args) :], strict=True)))
  found = [state for holder in (out, *optimizers) for state in find_loss_scales(holder).values()]
  finite = [np.any(state.grads_finite) for state in found]
  if not any(finite) and not any(np.any(np.asarray(state.skipped_steps) > 0) for state in found):
    raise ValueError(
      "the step updates no loss scale: expected a step that returns the new state of its optimiser, or "
      "changes an nnx.Optimizer"
    )
  if any(finite):
    raise ValueError(
      "gradients do not belong to the scaled loss: they are finite where the loss scale is infinite. The "
      "optimiser divides them by the scale, so that parameters stand still, or Adam's epsilon dominates: "
      "write loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch) instead of "
      "jax.value_and_grad, or mpjax.value_and_grad(loss_fn, optimizer)(model, batch) instead of "
      "nnx.value_and_grad. If the step does so already, a backward rule makes infinities finite: check with "
      "mpjax.loss_scale.check_loss_scaling(loss_fn, params, batch)"
    )


def _at_infinity(tree: PyTree) -> PyTree:
  """Returns a tree with infinite loss scales, whose record shows whether a step updates them."""
  refuse_multi_steps_outside(tree)
  # The fields may be Variables of nnx.
  filled = lambda field, value: jax.tree.map(lambda x: jnp.full_like(x, value), field)
  return map_states(
    tree,
    lambda state: state._replace(
      scale=filled(state.scale, np.inf),
      grads_finite=filled(state.grads_finite, False),
      skipped_steps=filled(state.skipped_steps, 0),
    ),
  )


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

  arrays, together = _taken_apart([*args, *keywords.values()])

  @jax.jit
  def gradients(scale: Array, arrays: list[Array]) -> PyTree:
    new = together(arrays)
    named = dict(zip(keywords, new[len(args) :], strict=True))
    state = first_state(LossScaling(kind="static"), ())._replace(scale=scale)
    _, scaled = value_and_grad(loss_alone, state)(*new[: len(args)], **named)
    return nnx.as_pure(unscale(scaled, scale))

  _check_gradients(lambda scale: gradients(jnp.float32(scale), arrays))


def _check_gradients(gradients_at: Callable[[float], PyTree]) -> None:
  """Compares gradients at the highest scale at which they are finite with those at a lower one, and at 1."""
  scale = _HIGHEST
  while not all_finite(hide(gradients_at(scale))):
    scale /= _RATIO
    if scale < _LOWEST:
      raise ValueError(
        f"gradients are not finite at any loss scale from {_HIGHEST:g} to {_LOWEST:g}: mpjax.find_nonfinite "
        "says where they become non-finite"
      )
  for low in (scale / _RATIO, 1.0):
    found = scale_dependent(gradients_at, (scale, low))
    if low == 1:  # where float16 loses gradients; those that a clip cuts shrink as the scale grows
      found = {path: norms for path, norms in found.items() if norms[0] < norms[1] / _RATIO}
    if found:
      path, norms = max(found.items(), key=lambda item: max(item[1]))
      others = f", and {len(found) - 1} more" if len(found) > 1 else ""
      raise ValueError(
        f"the gradient of {path or 'the argument'}{others} depends on the loss scale: unscaled, its norm is "
        f"{norms[0]:.3g} at a scale of {scale:g}, and {norms[1]:.3g} at {low:g}. A backward rule is not "
        "linear, such as a clip of cotangents in a custom_vjp, which sees them scaled. mpjax.full_precision "
        "does not change that: in the rule, divide by the scale first and multiply by it last. Or use "
        "'bf16', which needs no loss scale"
      )


def scale_dependent(
  gradients_at: Callable[[float], PyTree], scales: tuple[float, float]
) -> dict[str, tuple[float, float]]:
  """Returns the leaves whose unscaled gradient depends on the loss scale.

  A backward pass is linear in its first cotangent, so gradients divided by the scale are the same at every
  scale. They differ if a `custom_vjp` clips cotangents, and where float16 rounds, underflows or overflows:
  so `gradients_at` computes in float32, or both scales are in range.

  Args:
    gradients_at: (loss scale) -> the gradients of the scaled loss, divided by the scale in float32.
    scales: the two scales.

  Returns:
    The norms at the first and at the second scale, by tree path (`blocks/0/kernel`). Leaves that are not
    finite at either scale, or that are overwritten, are ignored.
  """
  norm = lambda x: float(jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x)))))
  one, other = (named_leaves(widen_floating(hide(gradients_at(scale)))) for scale in scales)
  norms = {
    path: (norm(x), norm(y), norm(x - y))
    for (path, x), (_, y) in zip(one, other, strict=True)
    if is_inexact(x) and all_finite((x, y))
  }
  noise = _ROUNDING * max((max(high, low) for high, low, _ in norms.values()), default=0.0)
  return {
    path: (high, low)
    for path, (high, low, apart) in norms.items()
    if apart > max(_TOLERANCE * max(high, low), noise)
  }


def _taken_apart(args: list[Any]) -> tuple[list[Array], Callable[[list[Array]], list[Any]]]:
  """Returns the arrays in some arguments, and a function that makes the arguments of other arrays."""
  is_array = lambda x: isinstance(x, (jax.Array, np.ndarray))
  # Modules all at once: one may be a part of another.
  graph, state = nnx.split([arg for arg in args if _is_node(arg)])
  leaves, structure = jax.tree.flatten((state, [None if _is_node(arg) else arg for arg in args]))

  def together(arrays: list[Array]) -> list[Any]:
    left = iter(arrays)
    state, others = jax.tree.unflatten(structure, [next(left) if is_array(x) else x for x in leaves])
    nodes = iter(nnx.merge(graph, state))
    return [next(nodes) if _is_node(arg) else other for arg, other in zip(args, others, strict=True)]

  return [x for x in leaves if is_array(x)], together


def _is_node(arg: Any) -> bool:
  return isinstance(arg, (nnx.Module, nnx.Optimizer, nnx.Rngs))
