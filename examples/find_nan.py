"""Finding a NaN: the operation that made the first one, its module and its line.

Run it: python examples/find_nan.py

The model divides by a norm that is zero for an empty row. For that batch the loss is NaN. The step is
skipped, and find_nonfinite says where it began.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


class Normalize(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))  # the fault: 0 / 0 where a row is zero


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(32, use_bias=False, name="up")(x))
    x = Normalize(name="normalize")(x)
    return nn.Dense(1, name="head")(x)


MODEL = Net()


def loss_fn(params, batch):
  return jnp.mean((MODEL.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def main(policy="bf16"):
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  batch = {"x": x, "y": x.sum(1, keepdims=True)}
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy, skip_nonfinite=True, donate=False)
  state = step.init(MODEL.init(jax.random.key(0), x)["params"])

  reports = []
  for name, data in (("whole", batch), ("empty row", {**batch, "x": np.where(np.arange(16)[:, None], x, 0)})):
    before = state
    state, metrics = step(before, data)
    print(f"{name}: loss {float(metrics['loss']):.3f}, gradients finite: {bool(metrics['grads_finite'])}")
    if not metrics["grads_finite"]:
      report = mpjax.find_nonfinite(step, before, data)  # the state before the step, and its batch
      print(report)
      reports.append(report)
  print(f"parameters are finite: {bool(mpjax.all_finite(state.params))}")
  return reports, state


if __name__ == "__main__":
  main()
