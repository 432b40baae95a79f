"""A model of named layers, in which one or several have a fault of a known format."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, ROWS = 128, 256
LAYERS = ("first", "one", "over", "near", "outlier", "narrow", "two", "last")
FEW = ("first", "one", "last")


def planted(*faults, layers=FEW):
  """Parameters, two batches and the loss function of a model in which some layers have a fault.

  With its fault, `over` overflows float16; `near` is a difference of near numbers, which bfloat16 rounds to
  noise and float16 does not; `outlier` has a column so large that per-tensor FP8 rounds the others to zero.
  `narrow` is too small to gain by FP8, and `first` and `last` stay as they are in its recipe.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  weight = lambda n=WIDTH, m=WIDTH: normal(n, m) / np.float32(n**0.5)
  params = {name: {"w": weight(WIDTH - (name == "outlier"))} for name in layers}
  if "narrow" in layers:
    params["narrow"] = {"w": weight(WIDTH, 32), "back": weight(32, WIDTH)}
  batches = [{"x": normal(ROWS, WIDTH), "y": normal(ROWS, WIDTH)} for _ in range(2)]
  big = 1e6 if "over" in faults else 1.0
  far = 256.0 if "near" in faults else 0.0
  small, column = (0.01, 6e4) if "outlier" in faults else (1.0, 0.0)

  def loss_fn(params, batch):
    x = batch["x"]
    for name in layers:
      w = params[name]["w"]
      with jax.named_scope(name):
        if name == "over":
          x = x + jnp.tanh((x @ (w * big)) * (1 / big))
        elif name == "near":
          common = jnp.eye(WIDTH) * far
          x = jnp.tanh(x @ (w + common) - x @ common)
        elif name == "outlier":
          wide = jnp.concatenate([x[:, 1:] * small, jnp.full((len(x), 1), column)], 1)
          x = x + jnp.tanh(wide @ jnp.concatenate([w / small, jnp.zeros((1, WIDTH))]))
        elif name == "narrow":
          x = x + jnp.tanh(x @ w) @ params[name]["back"]
        else:
          x = jnp.tanh(x @ w) if name != "last" else x @ w
    return jnp.mean((x - batch["y"]) ** 2)

  return params, batches, loss_fn
