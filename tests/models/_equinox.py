"""Models of Equinox's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models._model import Model, drawn, images


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


MODELS = {"Equinox nn.MLP": mlp}
