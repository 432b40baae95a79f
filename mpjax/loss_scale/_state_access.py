"""`get_loss_scale` and `scale_loss`: find the loss scale in an optimiser's state, and use it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float32, Num, PyTree

from mpjax._average import Average, worth
from mpjax._lazy import nnx
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._transform import LossScaleState

T = TypeVar("T")


def scale_loss(
  loss: Num[ArrayLike, "..."] | Average, opt_state: PyTree, *, path: str | None = None
) -> Float32[Array, "..."]:
  """Returns the loss times the loss scale, in float32 whatever the loss's dtype.

  Differentiate this, and give the gradients to the `update` of the transform that `opt_state` is of. Where
  `opt_state` has no loss scale the loss is only cast, so one loop serves every policy.

  Args:
    loss: a number [] (or any shape: every element is scaled), or an `mpjax.Average`, for its value.
    opt_state: an optimiser's state, as `mpjax.value_and_grad` takes it.
    path: which loss scale is meant, where there are several.

  Returns:
    f32 of the loss's shape.

  Raises:
    TypeError: if `opt_state` is no optimiser's state.
    ValueError: if there are several loss scales that `path` fits.
  """
  scaler = scaler_of(opt_state, path=path)
  loss = worth(loss).astype(jnp.float32)
  return loss if scaler is None else loss * scaler.scale


def get_loss_scale(opt_state: PyTree, *, path: str | None = None) -> LossScaleState:
  """Returns the `LossScaleState` in an optimiser's state, however deep it lies.

  Args:
    opt_state: a `LossScaleState`, any optax state that holds one (chain, masked, multi_transform,
      MultiSteps, inject_hyperparams, ...), or an `nnx.Optimizer`.
    path: a part of the key path of the one meant, where there are several; the error lists the paths.

  Raises:
    ValueError: if there is none, or if there are several that `path` fits.
  """
  found = all_loss_scales(opt_state)
  fitting = {key: state for key, state in found.items() if path is None or path in key}
  if len(fitting) == 1:
    return next(iter(fitting.values()))
  known = ", ".join(repr(key) for key in found)
  if not fitting:
    raise ValueError(f"no loss scale at path={path!r}: there are {known}")
  raise ValueError(
    f"{len(fitting)} loss scales in this optimiser state, at {known}: name the one meant by a part of "
    f"its path, as in get_loss_scale(opt_state, path={next(iter(fitting))!r})"
  )


def find_scaler(opt_state: PyTree, *, path: str | None = None) -> LossScaleState | None:
  """Returns what `get_loss_scale` does; `None` where there is no loss scale at all."""
  return get_loss_scale(opt_state, path=path) if find_loss_scales(opt_state) else None


def scaler_of(opt_state: PyTree, *, path: str | None = None) -> LossScaleState | None:
  """Returns what `find_scaler` does, for an argument that a user may mistake.

  Refused are an optimiser, a module, a leaf that is no array (a name, a policy, a number), a function, a
  mapping with strings, and what parameters are: an array, a mapping or a list whose leaves are all inexact,
  without a NamedTuple, of which optax makes its states. A tuple is taken, since a chain's state is one; so is
  a tree with an integer, which may be a count.

  Raises:
    TypeError: if `opt_state` is no optimiser's state.
    ValueError: if there are several loss scales that `path` fits.
  """
  scaler = find_scaler(opt_state, path=path)
  mistaken = _mistaken_for_state(opt_state) if scaler is None else None
  if mistaken is not None:
    raise TypeError(f"opt_state is {mistaken}")
  return scaler


def _mistaken_for_state(value: PyTree) -> str | None:
  """Returns what `value` is in place of an optimiser's state, and the way out; `None` if it may be one."""
  way_out = "pass its state, opt_state = tx.init(params)"
  if isinstance(value, optax.GradientTransformation):
    return f"an optimiser: {way_out}"
  if isinstance(value, nnx.Optimizer):
    return None
  way_out = "pass the state of the optimiser, opt_state = tx.init(params)"
  if isinstance(value, (str, int, float)):
    shown = reprlib.repr(value)
  else:
    shown = "an array" if isinstance(value, (jax.Array, np.ndarray)) else f"a {type(value).__name__}"
  leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Variable) or _is_named_tuple(x))
  if isinstance(value, nnx.Module) or callable(value) or any(isinstance(x, nnx.Param) for x in leaves):
    return f"{shown}: {way_out}, or the nnx.Optimizer"
  alone = len(leaves) == 1 and leaves[0] is value and not _is_named_tuple(value)
  if any(isinstance(x, str) for x in leaves) or (alone and not hasattr(value, "dtype")):
    return f"{shown}: {way_out}"
  if (alone or isinstance(value, (Mapping, list))) and leaves and all(map(is_inexact, leaves)):
    return (
      f"{shown}, as parameters are: {way_out}; if it is the state of a transform of your own, make that "
      "optax.chain(transform), whose state is a tuple"
    )
  return None


def _is_named_tuple(x: object) -> bool:
  return isinstance(x, tuple) and hasattr(x, "_fields")


def all_loss_scales(opt_state: PyTree) -> dict[str, LossScaleState]:
  """Returns what `find_loss_scales` finds.

  Raises:
    ValueError: if that is nothing.
  """
  found = find_loss_scales(opt_state)
  if not found:
    raise ValueError(
      f"no loss scale in this optimiser state ({type(opt_state).__name__}): wrap the optimiser, "
      "as in tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3)), and pass the state of that tx"
    )
  return found


def find_loss_scales(opt_state: PyTree) -> dict[str, LossScaleState]:
  """Returns the loss scales in an optimiser's state by key path, also those inside another one."""
  return find_states(opt_state, LossScaleState)


def refuse_multi_steps_outside(opt_state: PyTree) -> None:
  """Raises `ValueError` if `optax.MultiSteps` accumulates gradients before any loss scale has seen them.

  Its accumulator takes a non-finite gradient in, and stays NaN from then on; with a rule that drops such
  gradients no loss scale would hear of them, and back off.

  Args:
    opt_state: an optax state; a loss scale outside of `MultiSteps` makes it right.
  """
  kinds = (LossScaleState, optax.MultiStepsState)
  for state in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
    if isinstance(state, optax.MultiStepsState) and find_loss_scales(state.inner_opt_state):
      raise ValueError(
        "optax.MultiSteps stands outside the loss scale, so it adds up gradients that are not finite: put it "
        "inside, as in mpjax.dynamic_loss_scale(optax.MultiSteps(inner, k).gradient_transformation()), or "
        "accumulate by mpjax.make_train_step(..., accumulate=k)"
      )


def with_scale(tree: PyTree, scale: float) -> PyTree:
  """Returns a tree with every loss scale in it set to `scale`; each stays where it lies."""
  return map_states(tree, lambda state: state._replace(scale=jnp.full_like(state.scale, scale)))


def map_states(
  tree: PyTree, change: Callable[[Any], PyTree], kinds: tuple[type[Any], ...] = (LossScaleState,)
) -> PyTree:
  """Returns a tree with each state of some kinds changed, first those inside of it."""

  def one(leaf: PyTree) -> PyTree:
    if not isinstance(leaf, kinds):
      return leaf
    return change(leaf._replace(inner_state=map_states(leaf.inner_state, change, kinds)))

  return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, kinds))


def find_states(opt_state: PyTree, kind: type[T]) -> dict[str, T]:
  """Returns every state of type `kind` in an optimiser's state or an `nnx.Optimizer`, by key path."""
  if isinstance(opt_state, nnx.Optimizer):
    opt_state = opt_state.opt_state
  # nnx wraps each array of an optimiser's state in a Variable; arrays pass through.
  return find_in(nnx.as_pure(opt_state), kind)


def find_in(tree: PyTree, kind: type[T], prefix: str = "") -> dict[str, T]:
  """Returns every state of type `kind` in a tree, by key path, also those in the `inner_state` of one."""
  is_state = lambda x: isinstance(x, kind)
  found: dict[str, T] = {}
  for key, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
    if isinstance(leaf, kind):
      path = prefix + jax.tree_util.keystr(key)
      found[path] = leaf
      found |= find_in(getattr(leaf, "inner_state", None), kind, path + ".inner_state")
  return found
