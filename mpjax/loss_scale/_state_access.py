"""`get_loss_scale` and `scale_loss`: find the loss scale in an optimiser's state, and use it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float32, Num, PyTree

from mpjax._average import Average, worth
from mpjax._lazy import nnx
from mpjax.loss_scale._guard import is_inexact
from mpjax.loss_scale._transform import LossScaleState

T = TypeVar("T")


def scale_loss(
  loss: Num[ArrayLike, "..."] | Average, opt_state: PyTree, *, path: str | None = None
) -> Float32[Array, "..."]:
  """Returns the loss times the loss scale, in float32 for every dtype of the loss.

  ```python
  loss_of = lambda p: mpjax.scale_loss(loss_fn(p, batch), opt_state)
  grads = jax.grad(loss_of)(params)  # scaled, as tx.update takes them
  ```

  Differentiate the result, and give the gradients to `update` of the same transform. If `opt_state` has no
  loss scale, the loss is only cast, so one loop serves every policy. `mpjax.value_and_grad` does both steps.

  Args:
    loss: a number [] (or any shape: every element is scaled), or an `mpjax.Average`, for its value.
    opt_state: an optimiser's state, as `mpjax.value_and_grad` takes it.
    path: a part of the key path of the loss scale to use, if there are several.

  Returns:
    f32 of the loss's shape.

  Raises:
    TypeError: if `opt_state` is not an optimiser's state.
    ValueError: if several loss scales match `path`.
  """
  scaler = scaler_of(opt_state, path=path)
  loss = worth(loss).astype(jnp.float32)
  return loss if scaler is None else loss * scaler.scale


def get_loss_scale(opt_state: PyTree, *, path: str | None = None) -> LossScaleState:
  """Returns the `LossScaleState` in an optimiser's state, at any depth.

  ```python
  scaler = mpjax.get_loss_scale(opt_state)
  print(float(scaler.scale), int(scaler.skipped_steps))
  ```

  Args:
    opt_state: a `LossScaleState`, any optax state that holds one (chain, masked, multi_transform,
      MultiSteps, inject_hyperparams, ...), or an `nnx.Optimizer`.
    path: a part of the key path of the loss scale, if there are several; the error lists the paths.

  Returns:
    An `mpjax.LossScaleState` of scalar arrays.

  Raises:
    ValueError: if there is no loss scale, or if several match `path`.
  """
  found = all_loss_scales(opt_state)
  fitting = {key: state for key, state in found.items() if path is None or path in key}
  if len(fitting) == 1:
    return next(iter(fitting.values()))
  known = ", ".join(repr(key) for key in found)
  if not fitting:
    raise ValueError(f"no loss scale at path={path!r}; paths with a loss scale: {known}")
  raise ValueError(
    f"{len(fitting)} loss scales in this optimiser state, at {known}: choose one by a part of "
    f"its path, as in get_loss_scale(opt_state, path={next(iter(fitting))!r})"
  )


def find_scaler(opt_state: PyTree, *, path: str | None = None) -> LossScaleState | None:
  """Returns what `get_loss_scale` does; `None` if there is no loss scale."""
  return get_loss_scale(opt_state, path=path) if find_loss_scales(opt_state) else None


def scaler_of(opt_state: PyTree, *, path: str | None = None) -> LossScaleState | None:
  """Returns what `find_scaler` does, for an argument that a user may confuse with another.

  Refuses an optimiser, a module, a function and a mapping with strings, and a leaf that is not an array (a
  name, a policy, a number). Refuses also what looks like parameters: an array, a mapping or a list whose
  leaves are all inexact, without a NamedTuple (optax's states are NamedTuples). Takes a tuple, since the
  state of a chain is one, and a tree with an integer, which may be a count.

  Raises:
    TypeError: if `opt_state` is not an optimiser's state.
    ValueError: if several loss scales match `path`.
  """
  scaler = find_scaler(opt_state, path=path)
  mistaken = _mistaken_for_state(opt_state) if scaler is None else None
  if mistaken is not None:
    raise TypeError(f"opt_state is {mistaken}")
  return scaler


def _mistaken_for_state(value: PyTree) -> str | None:
  """Returns what `value` is instead of an optimiser's state, and the way out; `None` if it may be one."""
  if isinstance(value, optax.GradientTransformation):
    return "an optimiser: pass its state, opt_state = tx.init(params)"
  if isinstance(value, nnx.Optimizer):
    return None
  way_out = "pass the state of the optimiser, opt_state = tx.init(params), or the nnx.Optimizer"
  if isinstance(value, (str, int, float)):
    shown = reprlib.repr(value)
  else:
    shown = "an array" if isinstance(value, (jax.Array, np.ndarray)) else f"a {type(value).__name__}"
  leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Variable) or _is_named_tuple(x))
  alone = len(leaves) == 1 and leaves[0] is value and not _is_named_tuple(value)
  no_tree = isinstance(value, nnx.Module) or callable(value) or (alone and not hasattr(value, "dtype"))
  if no_tree or any(isinstance(x, (str, nnx.Param)) for x in leaves):
    return f"{shown}: {way_out}"
  if (alone or isinstance(value, (Mapping, list))) and leaves and all(map(is_inexact, leaves)):
    return (
      f"{shown}, like parameters: {way_out}; if it is the state of your own transform, use "
      "optax.chain(transform), whose state is a tuple"
    )
  return None


def _is_named_tuple(x: object) -> bool:
  return isinstance(x, tuple) and hasattr(x, "_fields")


def all_loss_scales(opt_state: PyTree) -> dict[str, LossScaleState]:
  """Returns what `find_loss_scales` finds.

  Raises:
    ValueError: if it finds nothing.
  """
  found = find_loss_scales(opt_state)
  if not found:
    raise ValueError(
      f"no loss scale in this optimiser state ({type(opt_state).__name__}): wrap the optimiser, "
      "as in tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3)), and pass the state of that tx"
    )
  return found


def find_loss_scales(opt_state: PyTree) -> dict[str, LossScaleState]:
  """Returns the loss scales in an optimiser's state by key path, also those inside another loss scale."""
  return find_states(opt_state, LossScaleState)


def refuse_multi_steps_outside(opt_state: PyTree) -> None:
  """Raises `ValueError` if `optax.MultiSteps` accumulates gradients before a loss scale checks them.

  Its accumulator would include a non-finite gradient and stay NaN. With a rule that drops such gradients, no
  loss scale would notice them and back off. A loss scale outside `MultiSteps` is right.
  """
  for state in find_states(opt_state, optax.MultiStepsState).values():
    if find_loss_scales(state.inner_opt_state):
      raise ValueError(
        "optax.MultiSteps is outside the loss scale, so it adds up gradients that are not finite: put it "
        "inside, as in mpjax.dynamic_loss_scale(optax.MultiSteps(inner, k).gradient_transformation()), or "
        "accumulate with mpjax.make_train_step(..., accumulate=k)"
      )


def with_scale(tree: PyTree, scale: float) -> PyTree:
  """Returns a tree with every loss scale in it set to `scale`."""
  return map_states(tree, lambda state: state._replace(scale=jnp.full_like(state.scale, scale)))


def map_states(tree: PyTree, change: Callable[[LossScaleState], PyTree]) -> PyTree:
  """Returns a tree with each loss scale in it changed; inner states are changed first."""
  is_scale = lambda x: isinstance(x, LossScaleState)

  def one(leaf: PyTree) -> PyTree:
    if not is_scale(leaf):
      return leaf
    return change(leaf._replace(inner_state=map_states(leaf.inner_state, change)))

  return jax.tree.map(one, tree, is_leaf=is_scale)


def find_states(opt_state: PyTree, kind: type[T], prefix: str = "") -> dict[str, T]:
  """Returns every state of type `kind` in an optimiser's state or an `nnx.Optimizer`, by key path.

  Finds states in another's `inner_state`, too. The paths begin with `prefix`.
  """
  if isinstance(opt_state, nnx.Optimizer):
    opt_state = opt_state.opt_state
  # nnx wraps each array of an optimiser's state in a Variable; arrays pass through.
  plain = nnx.as_pure(opt_state)
  found: dict[str, T] = {}
  for key, leaf in jax.tree_util.tree_leaves_with_path(plain, is_leaf=lambda x: isinstance(x, kind)):
    if isinstance(leaf, kind):
      path = prefix + jax.tree_util.keystr(key)
      found[path] = leaf
      found |= find_states(getattr(leaf, "inner_state", None), kind, path + ".inner_state")
  return found
