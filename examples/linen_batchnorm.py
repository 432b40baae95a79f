"""A linen model with BatchNorm: a batch with an infinity is skipped, and its statistics too.

Run it: python examples/linen_batchnorm.py [POLICY] [STEPS]
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


class ConvNet(nn.Module):  # no dtype= anywhere: the policy says it
  @nn.compact
  def __call__(self, images, train=True):
    x = images
    for width in (8, 16):
      x = nn.Conv(width, (3, 3), strides=2)(x)
      x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    return nn.Dense(2)(x.mean((1, 2)))


MODEL = ConvNet()


def stripes(seed, rows=32):
  """Images of 12 x 12 with stripes: across is class 0, upright is class 1."""
  rng = np.random.default_rng(seed)
  label = rng.integers(0, 2, rows)
  wave = np.sin(np.arange(12) * 1.5 + rng.uniform(0, 6, (rows, 1)))
  images = np.where(label[:, None, None] == 0, wave[:, :, None], wave[:, None, :])
  images = images + rng.normal(0, 0.3, images.shape)
  return {"x": images[..., None].astype(np.float32), "y": label.astype(np.int32)}


def loss_fn(params, batch, model_state):
  logits, model_state = MODEL.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
  return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}, model_state


def main(policy="fp16", steps=60):
  variables = MODEL.init(jax.random.key(0), stripes(0)["x"])
  step = mpjax.make_train_step(loss_fn, optax.adamw(5e-3), policy, skip_nonfinite=True)
  state = step.init(variables["params"], model_state={"batch_stats": variables["batch_stats"]})
  losses = []
  for i in range(steps):
    batch = stripes(i)
    if i == steps // 2:
      batch["x"][0, 0, 0, 0] = np.inf  # a damaged image
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  skipped = int(mpjax.get_loss_scale(state.opt_state).skipped_steps)
  print(f"{step.policy.label}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} step skipped")

  logits = MODEL.apply({"params": state.params, **state.model_state}, stripes(10**6)["x"], train=False)
  accuracy = float(jnp.mean(logits.argmax(-1) == stripes(10**6)["y"]))
  print(f"accuracy with the running statistics: {accuracy:.2f}")
  return losses, state, accuracy


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
