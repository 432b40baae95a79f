"""Delayed scaling: histories of amaxes as one tree, whose "gradient" is their next value.

The tree is overwritten instead of differentiated (`_overwrite_with_gradient`): the training step, or the
user, replaces it by its gradient, and keeps it on a skipped step.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from mpjax._types import Array, Fp8State
from mpjax.fp8._recipe import Recipe
from mpjax.fp8._scaling import scale_of

_Histories: TypeAlias = dict[str, dict[str, Array]]  # by product, then by operand
Opened: TypeAlias = tuple[dict[str, Array], Array]  # scales by product, the tie
OPERANDS = ("lhs", "rhs", "gradient")


def empty_state(lengths: dict[str, int]) -> Fp8State:
  """Returns histories of zeros, which stand for a scale of 1.

  Args:
    lengths: the length of the history of each product.

  Returns:
    `amax`: for each product, `lhs`, `rhs` and `gradient`: float32[length], newest first.
    `uses`: float32[], 1: the divisor of the histories, except their newest entries. If two differentiated
      calls share a state, their gradients are added, and it becomes 2.
  """
  histories = {
    site: {name: jnp.zeros([length], jnp.float32) for name in OPERANDS} for site, length in lengths.items()
  }
  return {"amax": histories, "uses": jnp.ones([], jnp.float32)}


def check_state(state: Fp8State, lengths: dict[str, int]) -> None:
  """Raises `ValueError` if a state belongs to another function or policy than these products.

  A state may lack some products: batches of other sizes have other FP8 products.
  """
  way_out = "make a state with mpjax.init_fp8_state(function, policy)(*arguments)"
  if not isinstance(state, dict) or state.keys() != {"amax", "uses"}:
    raise ValueError(
      f"fp8_state of type {type(state).__name__}: expected the state of delayed scaling; {way_out}"
    )
  found = state["amax"].keys()
  if lengths and found and not found & lengths.keys():
    raise ValueError(
      f"fp8_state belongs to another function: it has histories of {', '.join(sorted(found))}, and the "
      f"products here are {', '.join(sorted(lengths))}; {way_out}"
    )
  for site in found & lengths.keys():
    for name, history in state["amax"][site].items():
      if history.shape[-1:] != (lengths[site],):
        raise ValueError(
          f"fp8_state: history {name} of {site} has shape {history.shape}, but amax_history_len is "
          f"{lengths[site]}; {way_out}"
        )


def grow_gradients(state: Fp8State, factor: jax.Array) -> Fp8State:
  """Returns a state for gradients that will be larger by a factor, float32[]; `{}` for `{}`."""
  if not state:
    return state
  grown = {site: h | {"gradient": h["gradient"] * factor} for site, h in state["amax"].items()}
  return state | {"amax": grown}


def open_state(state: Fp8State, recipes: dict[str, Recipe]) -> Opened:
  """Returns the scales for this step, whose cotangents are its amaxes.

  Args:
    state: a state as `empty_state` returns it.
    recipes: the recipe of each history that is used.

  Returns:
    scales: by history, float32[3] for lhs, rhs and gradient.
    tie: a probe for results that are differentiated, so that a state always has a next value.
  """

  @jax.custom_vjp
  def open_histories(state: Fp8State) -> Opened:
    normal = _normalised(state)
    scales = {site: _scales(normal[site], recipe) for site, recipe in recipes.items()}
    return scales, jnp.zeros([3], jnp.float32)

  def forward(state: Fp8State) -> tuple[Opened, Fp8State]:
    return open_histories(state), state

  def backward(state: Fp8State, cotangents: Opened) -> tuple[Fp8State]:
    amaxes, _ = cotangents
    normal = _normalised(state)
    new = dict(normal)  # histories that were not used stay
    for site in recipes:
      new[site] = {name: _with(normal[site][name], amaxes[site][i]) for i, name in enumerate(OPERANDS)}
    return ({"amax": new, "uses": jnp.ones_like(state["uses"])},)

  open_histories.defvjp(forward, backward)
  return open_histories(state)


def _normalised(state: Fp8State) -> _Histories:
  uses = jnp.maximum(state["uses"], 1)
  return jax.tree.map(lambda h: h.at[1:].divide(uses), state["amax"])


def _scales(histories: dict[str, jax.Array], recipe: Recipe) -> jax.Array:
  formats = {"lhs": recipe.forward, "rhs": recipe.forward, "gradient": recipe.gradient}
  return jnp.stack([scale_of(histories[name].max(), formats[name], recipe.margin) for name in OPERANDS])


def _with(history: jax.Array, amax: jax.Array) -> jax.Array:
  """Returns a history a step later, without an amax that is not finite.

  If only zeros would be left, the last non-zero amax stays, as the oldest: this keeps the scale until a new
  amax is known.
  """
  new = jnp.concatenate([jnp.where(jnp.isfinite(amax), amax, 0)[None], history[:-1]])
  # The newest amax that is not zero; zero if all are.
  return jnp.where(new.any(), new, new.at[-1].set(history[jnp.argmax(history > 0)]))
