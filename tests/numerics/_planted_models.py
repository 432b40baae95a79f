"""A model with one fault of low precision in each of three known layers."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 32


def chain(big=1.0, small=1.0, still=1.0):
  """Four layers as a plain function of {layer: {"w": ...}}: parameters, a batch, and the loss function.

  `big` of 1e4 overflows float16 in layer `big`; `small` of 1e-7 leaves the gradient of layer `small` below it
  at loss scale 1, by two factors that are no constants, which a compiler would multiply and round; `still` of 32
  has large weights there, which small updates do not move.
  """
  rng = np.random.default_rng(1)
  sizes = {
    "first": 0.15,
    "big": 0.2 if big == 1 else big,
    "small": 0.15,
    "still": 0.15 if still == 1 else 8.0,
  }
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {name: {"w": np.float32(size) * normal(WIDTH, WIDTH)} for name, size in sizes.items()}
  batch = {"x": normal(16, WIDTH), "y": np.float32(0.5) * normal(16, WIDTH)}
  batch["z"] = np.full(WIDTH, small**0.5, np.float32)

  def loss_fn(params, batch):
    product = lambda name, x: x @ params[name]["w"]
    x = batch["x"].astype(params["first"]["w"].dtype)
    with jax.named_scope("first"):
      x = jnp.tanh(product("first", x))
    with jax.named_scope("big"):
      x = x + jnp.tanh(product("big", x) * (0.3 / big))
    with jax.named_scope("small"):
      root = batch["z"].astype(x.dtype)
      x = x + product("small", x) * root * root
    with jax.named_scope("still"):
      x = jnp.tanh(product("still", x) * (1 / still))
    return jnp.mean(jnp.sum((x.astype(jnp.float32) - batch["y"]) ** 2, -1))

  return params, batch, loss_fn
