"""Which products of modules are FP8, and modules chosen by their paths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

from tests.fp8._programs import D, by_path, fp8

SEQUENCE = np.arange(2 * D).reshape(2, D) % D


class Linen(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(D, D, name="embed", dtype=self.dtype)(tokens)
    x = x + nn.MultiHeadDotProductAttention(2, name="attn", dtype=self.dtype)(x)
    x = nn.gelu(nn.Dense(D, name="up", dtype=self.dtype)(x))
    return nn.Dense(D, name="head", dtype=self.dtype)(x)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_linen(dtype):
  model = Linen(dtype)
  variables = jax.eval_shape(model.init, jax.random.key(0), SEQUENCE)
  found = {path.removesuffix("/dropout"): k for path, k in by_path(model.apply, variables, SEQUENCE).items()}
  ends = {f"Linen/attn/{name}": "8" for name in ("query", "key", "value", "out")}
  assert found == {**ends, "Linen/attn": "bb", "Linen/up": "8", "Linen/head": "b"}


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(D, D, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(2, D, rngs=rngs, decode=False)
    self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2)])

  def __call__(self, tokens):
    x = self.embed(tokens)
    x = x + self.attn(x)
    for layer in self.layers:
      x = nnx.relu(layer(x))
    return self.embed.attend(x)


def test_nnx():
  model = Nnx(nnx.Rngs(0))
  found = by_path(model, SEQUENCE)
  assert found == {
    **{f"Nnx/attn/{name}": "8" for name in ("query", "key", "value", "out")},
    "Nnx/attn": "bb",
    "Nnx/layers/0": "8",
    "Nnx/layers/1": "8",
    "Nnx/embed": "b",
  }


# Overrides, and which of the modules are FP8 under them.
CHOSEN = [
  ({"layers/1": "fp8", ".*": "bf16"}, {"layers/1"}),
  ({".*/attn": "bf16"}, {"layers/0", "layers/1"}),
  ({".*/attn/query": "fp8", "attn": "bf16"}, {"attn/query", "layers/0", "layers/1"}),
]


def test_modules_chosen_by_path():
  model = Nnx(nnx.Rngs(0))
  for overrides, expected in CHOSEN:
    found = by_path(model, SEQUENCE, policy=fp8(overrides))
    assert {path for path, kind in found.items() if kind == "8"} == {f"Nnx/{p}" for p in expected}, overrides
  assert by_path(model, SEQUENCE, policy=fp8({"layers/1": "fp32"}))["Nnx/layers/1"] == "f"
