"""What a user's own training loop needs to serve every policy: `value_and_grad`, `keep_if_finite`, a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, PyTree

from mpjax._average import is_average
from mpjax._calls import require_arrays_only
from mpjax._lazy import nnx
from mpjax._own_autocast import autocast_within
from mpjax.dtypes import cast_like
from mpjax.loss_scale._guard import alike, keep_if, unscale
from mpjax.loss_scale._overwritten import hide
from mpjax.loss_scale._state_access import scaler_of
from mpjax.loss_scale._transform import LossScaleState
from mpjax.patterns import named_leaves
from mpjax.policy import warn_without_scale

T = TypeVar("T")


def value_and_grad(
  fun: Callable[..., Any],
  opt_state: PyTree,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  path: str | None = None,
) -> Callable[..., Any]:
  """Returns what `jax.value_and_grad` does, for the loss times the loss scale in `opt_state`.

  The value is the loss that `fun` returns, in float32. The gradients belong to the scaled loss, as the
  optimiser's `update` takes them. If `opt_state` has no loss scale, this is `jax.value_and_grad`, so one
  loop serves every policy:

  ```python
  tx = mpjax.with_loss_scaling(optax.adamw(1e-3), policy)
  opt_state = tx.init(params)
  loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = mpjax.apply_updates(params, updates)
  ```

  An `nnx.Module` is differentiated as by `nnx.value_and_grad`, and keeps the changes that `fun` makes in it.

  Args:
    fun: returns the loss, floating [] or an `mpjax.Average`; with `has_aux`, `(loss, aux)`.
    opt_state: the optimiser's state, from `tx.init(params)` or the last update, or an `nnx.Optimizer`.
    argnums: the positional argument, or arguments, to differentiate; for an `nnx.Module` also an
      `nnx.DiffState`.
    has_aux: whether `fun` returns `(loss, aux)`; `aux` is returned unchanged.
    path: the loss scale to use if there are several, as for `mpjax.get_loss_scale`.

  Returns:
    A function with the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`.

  Raises:
    TypeError: if `fun` is not a function, or `opt_state` is not an optimiser's state: an optimiser, a policy,
      its name, a number, a module, or parameters. An array, a mapping or a list counts as parameters if all
      its leaves are inexact. If your own state is such a tree, `optax.chain(transform)` makes it a tuple.
    ValueError: if several loss scales match `path`.

  Warns:
    PrecisionWarning: if `fun` is an `mpjax.autocast` under a policy that scales the loss, such as `fp16`, and
      `opt_state` has no loss scale.
  """
  if not callable(fun):
    raise TypeError(f"fun is a {type(fun).__name__}: call mpjax.value_and_grad(loss_fn, opt_state)")
  scaler = scaler_of(opt_state, path=path)
  own = autocast_within(fun)
  if scaler is None and own is not None:
    warn_without_scale(own.policy, "opt_state has no loss scale")

  def scaled(*args: PyTree, **kwargs: PyTree) -> tuple[Any, tuple[Any, PyTree]]:
    """Returns the loss times the scale, and `(loss, aux)`."""
    out = fun(*args, **kwargs)
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
      raise TypeError(f"fun returned a {type(out).__name__}: expected (loss, aux), as has_aux=True says")
    loss, aux = out if has_aux else (out, None)
    loss = loss.value if is_average(loss) else loss
    if scaler is None:
      return loss, (None, aux)
    loss = _in_float32(loss)
    return loss * scaler.scale, (loss, aux)

  @functools.wraps(fun, updated=())
  def differentiate(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
    of = nnx.value_and_grad if _has_module(args) else jax.value_and_grad
    if of is jax.value_and_grad:
      require_arrays_only([args[i] for i in np.atleast_1d(argnums) if i < len(args)])
    (value, (loss, aux)), grads = of(scaled, argnums=argnums, has_aux=True)(*args, **kwargs)
    loss = value if scaler is None else loss
    return ((loss, aux) if has_aux else loss), grads

  return differentiate


def keep_if_finite(opt_state: PyTree, new: T, old: T, *, path: str | None = None) -> T:
  """Returns `new` if the last step was taken, else `old`, leaf by leaf.

  ```python
  updates, opt_state = tx.update(grads, opt_state, params)
  count = mpjax.keep_if_finite(opt_state, count + 1, count)  # after the update, with its state
  ```

  A skipped step leaves parameters and optimiser state as they were. Everything else that a step changes needs
  this: BatchNorm statistics, counters, caches.

  Args:
    opt_state: the state that the step's `update` returned, as `mpjax.value_and_grad` takes it. Without a loss
      scale no step is skipped, and `new` is returned.
    new: any tree, such as linen's `batch_stats` or `nnx.state(model, nnx.BatchStat)`.
    old: the same tree from before the step. For a module that changes in place, pass
      `nnx.as_pure(nnx.state(model, nnx.BatchStat))`, which holds arrays and not the module's own Variables.
    path: the loss scale to use if there are several, as for `mpjax.get_loss_scale`.

  Returns:
    A tree in the dtypes of `old`; leaves that are not arrays come from `new`.

  Raises:
    TypeError: if `opt_state` is not an optimiser's state.
    ValueError: if `new` and `old` differ in structure, or several loss scales match `path`.
  """
  scaler = scaler_of(opt_state, path=path)
  if _variables(new) & _variables(old):
    raise ValueError(
      "new and old are the same Variables of a module, which changes in place: copy the arrays before the "
      "step, as in old = nnx.as_pure(nnx.state(model, nnx.BatchStat))"
    )
  if not alike(new, old):
    new, old = nnx.as_pure(new), nnx.as_pure(old)
  if not alike(new, old):
    names = [{name for name, _ in named_leaves(tree)} for tree in (new, old)]
    only = sorted(names[0] ^ names[1]) or [type(new).__name__, type(old).__name__]
    raise ValueError(
      f"new and old differ in structure (at {', '.join(only[:3])}): expected the same tree from before and "
      "after the step"
    )
  new = cast_like(new, old)
  if scaler is None:
    return new
  kept: T = jax.tree.map(functools.partial(keep_if, scaler.taken), new, old)
  return kept


def gradient_norm(grads: PyTree, opt_state: PyTree, *, path: str | None = None) -> Float32[Array, ""]:
  """Returns the global norm of the unscaled gradients, under every policy.

  ```python
  loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
  print(loss, mpjax.loss_scale.gradient_norm(grads, opt_state))  # before the update, which changes the scale
  ```

  Leaves that are overwritten instead of differentiated (FP8 scales and amax histories) do not count.

  Args:
    grads: gradients as `mpjax.value_and_grad` returns them: scaled, if there is a loss scale.
    opt_state: the state that they were computed with, as `mpjax.value_and_grad` takes it.
    path: the loss scale to use if there are several, as for `mpjax.get_loss_scale`.

  Returns:
    f32[]; not finite if a gradient is not.

  Raises:
    TypeError: if `opt_state` is not an optimiser's state.
    ValueError: if several loss scales match `path`.
  """
  return unscaled_norm(grads, scaler_of(opt_state, path=path))


def unscaled_norm(grads: PyTree, scaler: LossScaleState | None) -> Float32[Array, ""]:
  """Returns what `gradient_norm` does, for a given loss scale."""
  scale = jnp.ones([], jnp.float32) if scaler is None else scaler.scale
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(unscale(hide(grads), scale))]
  return jnp.sqrt(sum(squares, start=jnp.zeros([]))).astype(jnp.float32)


def _variables(tree: PyTree) -> set[int]:
  is_variable = lambda x: isinstance(x, nnx.Variable)
  return {id(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(leaf)}


def _has_module(tree: PyTree) -> bool:
  is_module = lambda x: isinstance(x, nnx.Module)
  return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _in_float32(loss: PyTree) -> Float32[Array, "..."]:
  dtype = getattr(loss, "dtype", None)
  if not isinstance(loss, float) and (dtype is None or not jnp.issubdtype(dtype, jnp.floating)):
    raise TypeError(
      f"fun returned a loss that is {type(loss).__name__ if dtype is None else dtype}: expected a floating "
      "scalar; if it returns (loss, aux), pass has_aux=True"
    )
  return jnp.asarray(loss).astype(jnp.float32)
