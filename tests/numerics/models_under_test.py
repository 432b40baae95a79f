"""A model with one fault of low precision in each of three known layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 32


class Planted(nn.Module):
  """`big` overflows float16, `small` has gradients below it, `still` has weights that small updates do not move."""

  big: float = 1e4
  small: float = 1e-7
  still: float = 8.0

  @nn.compact
  def __call__(self, x):
    dense = lambda name, scale=0.2: nn.Dense(WIDTH, name=name, kernel_init=nn.initializers.normal(scale))
    x = jnp.tanh(dense("first")(x))
    x = jnp.tanh(dense("big", self.big)(x) * (0.3 / self.big))
    x = x + dense("small")(x) * self.small
    x = jnp.tanh(dense("still", self.still)(x) * (0.2 / self.still))
    return dense("last")(x)


def planted(**sizes):
  """The model's parameters, a batch, and its loss function."""
  model = Planted(**sizes)
  rng = np.random.default_rng(0)
  batch = {
    "x": jnp.asarray(rng.standard_normal((64, WIDTH)), jnp.float32),
    "y": jnp.asarray(rng.standard_normal((64, WIDTH)), jnp.float32),
  }
  params = model.init(jax.random.key(0), batch["x"])["params"]

  def loss_fn(params, batch):
    out = model.apply({"params": params}, batch["x"].astype(jax.tree.leaves(params)[0].dtype))
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

  return params, batch, loss_fn
