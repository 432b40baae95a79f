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
  """Returns the global norm of the unscaled gradients, whatever the policy.

  ```python
  loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
  log(loss, mpjax.loss_scale.gradient_norm(grads, opt_state))  # before the update, which moves the scale
  ```

  Leaves that are overwritten rather than differentiated (FP8 scales and amax histories) do not count.

  Args:
    grads: as `mpjax.value_and_grad` gives them and `update` takes them: scaled, if there is a loss scale.
    opt_state: the state that they were taken with, as `mpjax.value_and_grad` takes it.
    path: which loss scale is meant, where there are several, as for `mpjax.get_loss_scale`.

  Returns:
    f32[]; not finite if a gradient is not.

  Raises:
    TypeError: if `opt_state` is no optimiser's state.
    ValueError: if there are several loss scales that `path` fits.
  """
  return unscaled_norm(grads, scaler_of(opt_state, path=path))


def unscaled_norm(grads: PyTree, scaler: LossScaleState | None) -> Float32[Array, ""]:
  """Returns what `gradient_norm` does, under the loss scale that is given."""
  scale = jnp.ones([], jnp.float32) if scaler is None else scaler.scale
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(unscale(hide(grads), scale))]
  return jnp.sqrt(sum(squares, start=jnp.zeros([]))).astype(jnp.float32)
