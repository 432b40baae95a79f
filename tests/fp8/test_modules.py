"""Which products of modules are FP8: linen and nnx, and modules chosen by their paths."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.fp8._programs import D, by_path, fp8


class Linen(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(D, D, name="embed", dtype=self.dtype)(tokens)
    for i in range(2):
      h = nn.LayerNorm(name=f"norm{i}", dtype=self.dtype)(x)
      h = nn.MultiHeadDotProductAttention(2, name=f"attn{i}", dtype=self.dtype)(h)
      h = nn.Dense(2 * D, name=f"up{i}", dtype=self.dtype)(x + h)
      x = x + nn.Dense(D, name=f"down{i}", dtype=self.dtype)(nn.gelu(h))
    return nn.Dense(D, name="head", dtype=self.dtype)(x)


BLOCKS = {
  f"Linen/{layer}{i}{part}": "8"
  for i in range(2)
  for layer, parts in (("attn", ("/query", "/key", "/value", "/out")), ("up", ("",)), ("down", ("",)))
  for part in parts
}
LINEN = {**BLOCKS, "Linen/attn0": "bb", "Linen/attn1": "bb", "Linen/head": "b"}
SEQUENCE = np.arange(2 * D).reshape(2, D) % D


@functools.cache
def linen(dtype=None):
  model = Linen(dtype)
  return model.apply, jax.eval_shape(model.init, jax.random.key(0), SEQUENCE)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_linen(dtype):
  apply, variables = linen(dtype)
  found = {path.removesuffix("/dropout"): k for path, k in by_path(apply, variables, SEQUENCE).items()}
  assert found == LINEN


# Overrides, and which of the blocks' modules are FP8 under them.
CHOSEN = [
  ({"up0": "fp8", "attn1": "fp8", ".*": "bf16"}, lambda p: "up0" in p or "attn1" in p),
  ({".*/attn0": "bf16"}, lambda path: "attn0" not in path),
  ({".*/attn0/query": "fp8", "attn0": "bf16"}, lambda p: "attn0" not in p or "query" in p),
]


def test_modules_chosen_by_path():
  apply, variables = linen()
  for overrides, expected in CHOSEN:
    found = by_path(apply, variables, SEQUENCE, policy=fp8(overrides))
    assert {p for p, kind in found.items() if kind == "8"} == {p for p in BLOCKS if expected(p)}, overrides
  assert by_path(apply, variables, SEQUENCE, policy=fp8({"up0": "fp32"})) == {**LINEN, "Linen/up0": "f"}


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
  chosen = by_path(model, SEQUENCE, policy=fp8({"layers/1": "fp8", ".*": "bf16"}))
  assert [path for path, kind in chosen.items() if kind == "8"] == ["Nnx/layers/1"]
