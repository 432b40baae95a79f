"""The reason for loss scaling: a task whose float16 gradients are zero unless the loss is scaled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

TARGET = np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["in"])
  error = (hidden @ params["out"]).astype(jnp.float32) - batch["y"]
  # A small loss, as of a well-trained or down-weighted head: its gradients are below float16's 6e-8.
  return 1e-8 * (error**2).mean()


def final_loss(policy):
  keys = jax.random.split(jax.random.key(0))
  params = {"in": jax.random.normal(keys[0], (8, 64)) / 3, "out": jax.random.normal(keys[1], (64, 1)) / 8}
  # Adam's own epsilon would hide gradients of this size.
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2, eps=1e-20), policy)
  state, losses = step.init(params), []
  for _ in range(200):
    state, metrics = step(state, {"x": X, "y": TARGET})
    losses.append(float(metrics["loss"]))
  return losses[0], losses[-1], state


@pytest.mark.parametrize("scaling", ["dynamic", 2.0**14])
def test_float16_learns_as_float32_does_once_the_loss_is_scaled(scaling):
  start, float32, _ = final_loss("fp32")
  assert float32 < start / 20
  _, unscaled, state = final_loss({"base": "fp16", "loss_scaling": None})
  assert unscaled == pytest.approx(start, rel=1e-3)
  _, grads = mpjax.make_train_step(
    loss_fn, optax.identity(), {"base": "fp16", "loss_scaling": None}
  ).gradients(state.replace(opt_state=optax.EmptyState()), {"x": X, "y": TARGET})
  assert all((g == 0).all() for g in jax.tree.leaves(grads))
  _, scaled, _ = final_loss({"base": "fp16", "loss_scaling": scaling})
  assert scaled < start / 20
