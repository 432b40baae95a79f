"""`gradient_norm`: the norm of gradients for a log, unscaled under every policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from mpjax.loss_scale._finite import unscale
from mpjax.loss_scale._overwritten import hide
from mpjax.loss_scale._state_access import scaler_of
from mpjax.loss_scale._transform import LossScaleState


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
