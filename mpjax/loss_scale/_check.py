"""`check_loss_scaling`: whether the loss scale works, in an optimiser, a step or a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._average import is_average
from mpjax._lazy import nnx
from mpjax._types import Array, ArrayLike, PyTree
from mpjax.dtypes import at_least_float32, widen_floating
from mpjax.loss_scale._guard import all_finite, is_inexact, unscale
from mpjax.loss_scale._overwritten import COLLECTION, hide, is_overwritten
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
_Update: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# Far apart, since a clip outside may have any bound. Neither is below 1, the smallest scale that a transform
# must take. The made-up gradients are in float32, which holds them at both scales.
_SCALES = (1.0, 2.0**40)
_WAY_OUT = (
  "the loss scale belongs outermost, as in "
  "mpjax.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))"
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
    _check_optimizer(checked, *args, **keywords)
  elif hasattr(checked, "tx") and hasattr(checked, "gradients") and len(args) == 2:
    _check_made_step(checked, *args, **keywords)
  elif not callable(checked) or not args:
    raise TypeError(f"check_loss_scaling of a {type(checked).__name__} and {len(args)} arguments: {_USAGE}")
  elif any(isinstance(arg, nnx.Optimizer) or find_loss_scales(arg) for arg in (*args, *keywords.values())):
    _check_own_step(checked, args, keywords)
  else:
    _check_loss(checked, args, keywords)


def _check_optimizer(tx: optax.GradientTransformation, params: PyTree, **extra_args: object) -> None:
  """Raises `ValueError` if an optimiser's updates depend on its loss scale, or a skipped step leaves a trace.

  Three steps at each of two scales must give the same updates. A gradient that is not finite, in each leaf
  in turn, must leave parameters and state the same bit for bit; of several loss scales each skips its own.
  """
  first = tx.init(params)
  refuse_multi_steps_outside(first)
  alone = len(all_loss_scales(first)) == 1
  update = jax.jit(lambda grads, state: tx.update(grads, state, params, **extra_args))
  gradients = [_gradients(params, seed, size) for seed, size in enumerate((1.0, 64.0, 0.25))]
  _check_scales(update, first, gradients)
  _check_skips(update, first, _scaled(gradients[0], _SCALES[1]), alone)


def _check_scales(update: _Update, first: PyTree, gradients: list[PyTree]) -> None:
  """Takes a step for each gradient, at each scale."""
  states = [first] * len(_SCALES)
  for grads in gradients:
    made = []
    for i, scale in enumerate(_SCALES):
      given = _scaled(grads, scale)
      updates, states[i] = update(given, with_scale(states[i], scale))
      made.append(updates)
      for path, value, out in _leaves(given, updates):
        if COLLECTION in path and not np.array_equal(value, out):
          raise ValueError(
            f"update {path} differs from the value that was handed in: leaves under {COLLECTION!r} are "
            f"overwritten, and no transform outside the loss scale may change them; {_WAY_OUT}"
          )
    for path, low, high in _leaves(*made):
      tolerance = 1e-6 * float(np.abs(low).max(initial=0)) if is_inexact(low) else 0
      if is_inexact(low) and not np.allclose(low, high, rtol=1e-3, atol=tolerance):
        raise ValueError(
          f"update {path} depends on the loss scale: a transform outside it reads scaled gradients, or "
          f"gradients are unscaled twice or not at all; {_WAY_OUT}"
        )


def _check_skips(update: _Update, first: PyTree, grads: PyTree, alone: bool) -> None:
  """Takes a warm-up step, then for every leaf a step in which that leaf is not finite."""
  _, state = update(grads, with_scale(first, _SCALES[1]))
  outside = lambda state: map_states(state, lambda scale: scale.inner_state)
  good = _two_steps(update, grads, grads, state)
  leaves, structure = jax.tree.flatten(grads)
  for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(grads)[0]):
    if not is_inexact(leaf) or not np.size(leaf) or is_overwritten(path):
      continue
    # A NaN passes a clip, which makes an infinity finite.
    for value in (jnp.nan, jnp.inf):
      bad = jax.tree.unflatten(structure, [*leaves[:i], jnp.full_like(leaf, value), *leaves[i + 1 :]])
      if alone and _same(good, _two_steps(update, bad, grads, state)):
        continue  # no update reads that gradient: the leaf is frozen
      where = f"a step whose gradient {jax.tree_util.keystr(path)} is not finite"
      updates, new = update(bad, state)
      for j, (at, out) in enumerate(jax.tree_util.tree_flatten_with_path(updates)[0]):
        counts = is_inexact(out) and not is_overwritten(at)
        if counts and np.any(out != 0) and (alone or i == j or not np.isfinite(out).all()):
          raise ValueError(
            f"{where} still updates {jax.tree_util.keystr(at)}: a mask, a group or a clip hides that "
            f"gradient from the loss scale; {_WAY_OUT}"
          )
      changed = [path for path, *values in _leaves(outside(new), outside(state)) if not _same(*values)]
      if alone and changed:
        raise ValueError(
          f"{where} still changes the state {changed[0]}, which belongs to a transform outside the loss "
          f"scale; {_WAY_OUT}"
        )


def _two_steps(update: _Update, first: PyTree, second: PyTree, state: PyTree) -> PyTree:
  """Returns the updates of two steps, one after the other."""
  updates, state = update(first, state)
  return updates, update(second, state)[0]


def _gradients(params: PyTree, seed: int, size: float) -> PyTree:
  """Draws normal gradients of norm about `size`, in float32 or wider; zeros for others."""
  rng = np.random.default_rng(seed)
  count = sum(np.size(p) for p in jax.tree.leaves(params) if is_inexact(p)) or 1

  def leaf(p: ArrayLike) -> Array | np.ndarray:
    if not is_inexact(p):
      return np.zeros(np.shape(p), jax.dtypes.float0)
    dtype = at_least_float32(jnp.asarray(p).dtype)
    return jnp.asarray(rng.normal(size=np.shape(p)) * (size / np.sqrt(count)), dtype)

  return jax.tree.map(leaf, params)


def _scaled(grads: PyTree, scale: float) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, g: g * scale if is_inexact(g) and not is_overwritten(path) else g, grads
  )


def _same(a: PyTree, b: PyTree) -> bool:
  return all(x.tobytes() == y.tobytes() for _, x, y in _leaves(a, b))


def _leaves(a: PyTree, b: PyTree) -> list[tuple[str, np.ndarray, np.ndarray]]:
  """Returns path and both values of every leaf of two trees of one structure; keys as their data."""

  def value(x: PyTree) -> np.ndarray:
    if jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return np.asarray(x)

  pairs = zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True)
  return [(jax.tree_util.keystr(path), value(x), value(y)) for (path, x), y in pairs]


def _check_made_step(step: Any, state: Any, batch: PyTree) -> None:
  all_loss_scales(state.opt_state)
  if not isinstance(state.opt_state, LossScaleState):  # a step puts it outermost
    _check_optimizer(step.tx, state.arrays)

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
    found = _scale_dependent(gradients_at, (scale, low))
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


def _scale_dependent(
  gradients_at: Callable[[float], PyTree], scales: tuple[float, float]
) -> dict[str, tuple[float, float]]:
  """Returns the leaves whose unscaled gradient depends on the scale, with its norm at each of two, by path.

  A backward pass is linear in its first cotangent, so gradients divided by the scale are the same at every
  scale. They differ if a `custom_vjp` clips cotangents, and where float16 rounds, underflows or overflows: so
  both scales are in range. Leaves that are not finite, or that are overwritten, are ignored.
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
