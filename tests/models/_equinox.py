"""Models of Equinox's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models._model import CLASSES, Model, cross_entropy, drawn, images


def model(eqx: Any, build: Callable[[jax.Array], Any], loss: Callable[..., jax.Array], batch: Any) -> Model:
  """Returns the model of `build(key)`, whose loss takes (module, batch, key)."""
  shapes = eqx.filter_eval_shape(build, jax.random.key(0))
  shapes, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
  of_module = lambda params, batch, key: loss(eqx.combine(params, static), batch, key)
  return Model(of_module, drawn(shapes), batch)


def mlp():
  eqx = pytest.importorskip("equinox")

  def loss(module, batch, key):
    return jnp.mean((jax.vmap(module)(batch["x"]) - batch["y"]) ** 2)

  x = images(64, 4)["x"]
  batch = {"x": x, "y": np.sin(2 * x[:, :2])}
  return model(eqx, lambda key: eqx.nn.MLP(4, 2, 64, 3, activation=jax.nn.silu, key=key), loss, batch)


def vit():
  eqx = pytest.importorskip("equinox")
  width = 64

  class Block(eqx.Module):
    norms: list[Any]
    attention: Any
    mlp: Any

    def __init__(self, key):
      first, second = jax.random.split(key)
      self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
      self.attention = eqx.nn.MultiheadAttention(4, width, dropout_p=0.1, key=first)
      self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x, key):  # [T, D]
      y = jax.vmap(self.norms[0])(x)
      x = x + self.attention(y, y, y, key=key)
      return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

  class ViT(eqx.Module):
    patches: Any
    token: jax.Array
    position: jax.Array
    block: Any
    norm: Any
    head: Any

    def __init__(self, key):
      keys = jax.random.split(key, 5)
      self.patches = eqx.nn.Conv2d(3, width, 4, 4, key=keys[0])
      self.token = jax.random.normal(keys[1], (1, width))
      self.position = jax.random.normal(keys[2], (17, width))
      self.block = Block(keys[3])
      self.norm = eqx.nn.LayerNorm(width)
      self.head = eqx.nn.Linear(width, CLASSES, key=keys[4])

    def __call__(self, x, key):  # [C, H, W]
      x = self.patches(x).reshape(width, -1).T
      x = jnp.concatenate([self.token, x]) + self.position
      return self.head(self.norm(self.block(x, key)[0]))

  def loss(module, batch, key):
    logits = jax.vmap(module)(batch["x"], jax.random.split(key, len(batch["x"])))
    return cross_entropy(logits, batch["y"])

  return model(eqx, ViT, loss, images(8, 3, 16, 16))


MODELS = {"Equinox nn.MLP": mlp, "Equinox ViT": vit}
