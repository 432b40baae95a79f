"""Tries an optimiser on made-up gradients: whether its loss scale works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._types import Array, ArrayLike, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.loss_scale._guard import is_inexact
from mpjax.loss_scale._overwritten import COLLECTION, is_overwritten
from mpjax.loss_scale._state_access import (
  all_loss_scales,
  map_states,
  refuse_multi_steps_outside,
  with_scale,
)

_Update: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# Far apart, since a clip outside may have any bound. Neither is below 1, the smallest scale that a transform
# must take. The made-up gradients are in float32, which holds them at both scales.
_SCALES = (1.0, 2.0**40)
_WAY_OUT = (
  "the loss scale belongs outermost, as in "
  "mpjax.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))"
)


def check_optimizer(tx: optax.GradientTransformation, params: PyTree, **extra_args: object) -> None:
  """Raises `ValueError` if an optimiser's updates depend on its loss scale, or a skipped step leaves a trace.

  Three steps at each of two scales must give the same updates. A gradient that is not finite, in each leaf
  in turn, must leave parameters and state the same bit for bit. This finds a clip or a moving average outside
  the loss scale, a mask that hides a leaf from it, and a count that goes on.

  Args:
    tx: a transform with a loss scale somewhere in it. If it has several, each must skip only its own leaves.
    params: tree of parameters; their values are used.
    **extra_args: keyword arguments for `tx.update`, such as `value`.

  Raises:
    ValueError: if there is no loss scale, or if it does not work; names the leaf and the reason.
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
      _check_updates(where, i, updates, alone)
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


def _check_updates(where: str, bad: int, updates: PyTree, alone: bool) -> None:
  for i, (path, out) in enumerate(jax.tree_util.tree_flatten_with_path(updates)[0]):
    if not is_inexact(out) or is_overwritten(path):
      continue
    if np.any(np.asarray(out) != 0) and (alone or i == bad or not np.isfinite(out).all()):
      raise ValueError(
        f"{where} still updates {jax.tree_util.keystr(path)}: a mask, a group or a clip hides that gradient "
        f"from the loss scale; {_WAY_OUT}"
      )


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
