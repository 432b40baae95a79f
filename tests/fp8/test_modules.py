"""Which products of modules are FP8: linen, nnx, Equinox and Haiku, and modules chosen by their paths."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.casting import _fp8_products  # stands in for a device
from tests.fp8._programs import D, X, by_path, fp8, kinds, traced


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


# Options of the policy, and which of the blocks' modules are FP8 under it.
CHOSEN = [
  ({"overrides": {"up0": "fp8", "attn1": "fp8", ".*": "bf16"}}, lambda p: "up0" in p or "attn1" in p),
  ({"overrides": {".*/attn0": "bf16"}}, lambda path: "attn0" not in path),
  ({"overrides": {"up0": "bf16", "down0/?": "bf16"}}, lambda path: path[6:] not in ("up0", "down0")),
  ({"overrides": {"up0": "fp8", "Linen": "bf16"}}, lambda path: path[6:] == "up0"),
  ({"overrides": {".*/attn0/query": "fp8", "attn0": "bf16"}}, lambda p: "attn0" not in p or "query" in p),
]


def test_modules_chosen_by_path():
  apply, variables = linen()
  for options, expected in CHOSEN:
    found = by_path(apply, variables, SEQUENCE, policy=fp8(**options))
    assert {p for p, kind in found.items() if kind == "8"} == {p for p in BLOCKS if expected(p)}, options


def test_float32_modules_within_fp8():
  apply, variables = linen()
  found = by_path(apply, variables, SEQUENCE, policy=fp8(overrides={"up0": "fp32"}))
  assert found == {**LINEN, "Linen/up0": "f"}


def test_an_fp8_module_within_bfloat16(monkeypatch):
  # A device that has FP8 units, as far as autocast is told.
  monkeypatch.setattr(_fp8_products, "fp8_units", lambda recipe, device=None: (True, ""))
  shapes = jax.eval_shape(Wide().init, jax.random.key(0), jax.ShapeDtypeStruct((4, 128), jnp.int32))
  tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  found = by_path(Wide().apply, shapes, tokens, policy={"base": "bf16", "overrides": {"up": "fp8"}})
  assert found == {"Wide/up": "8", "Wide/down": "b", "Wide/head": "b"}
  assert by_path(Wide().apply, shapes, tokens, policy="fp8") == {
    "Wide/up": "8",
    "Wide/down": "8",
    "Wide/head": "b",
  }


class Wide(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(128, 128)(tokens)
    x = nn.Dense(256, name="up")(x)
    return nn.Dense(128, name="head")(nn.Dense(128, name="down")(nn.relu(x)))


def test_linen_layers_under_lifted_transforms():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return nn.relu(nn.Dense(D, name="dense")(x)), None

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(D, name="first")(x)
      scan = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
      x, _ = scan(name="layers")(x, None)
      return nn.Dense(D, name="head")(nn.jit(nn.Dense)(D, name="jitted")(x))

  model = Stack()
  variables = jax.eval_shape(model.init, jax.random.key(0), X)
  found = by_path(model.apply, variables, X)
  assert "".join(found.values()) == "b88b"
  grads = jax.grad(lambda v: mpjax.autocast(lambda v: (model.apply(v, X) ** 2).mean(), fp8())(v))
  assert traced(grads, variables) == [("4", "4")] * 3 + [("4", "5")] * 2 + [("5", "4")] * 2


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


def test_nnx_layers_in_a_scan():
  class Stack(nnx.Module):
    def __init__(self):
      self.first = nnx.Linear(D, D, rngs=nnx.Rngs(0))
      self.layers = nnx.vmap(lambda key: nnx.Linear(D, D, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
      )
      self.last = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    def __call__(self, x):
      x = self.first(x)
      x = nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, self.layers
      )
      return self.last(x)

  assert "".join(by_path(Stack(), X).values()) == "b8b"


def test_equinox():
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.MLP(D, D, D, 3, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)
  apply = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
  assert kinds(apply, params, X) == "b88b"
  assert traced(mpjax.autocast(apply, fp8()), params, X) == [("4", "4")] * 2


def test_haiku():
  hk = pytest.importorskip("haiku")
  model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([D, D, D, 10])(x)))
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  assert by_path(model.apply, params, X) == {
    "mlp/linear_0": "b",
    "mlp/linear_1": "8",
    "mlp/linear_2": "8",
    "mlp/linear_3": "b",
  }


def test_the_table_says_which_products_are_fp8_and_why_others_are_not():
  apply, variables = linen()
  explanation = mpjax.explain(apply, variables, SEQUENCE, policy=fp8())
  flops = explanation.matrix_flops()
  rows, scores = 2 * D, 2 * 2 * (2 * D * D * D)  # both attention products of both layers
  assert flops == {"float8_e4m3fn": 2 * rows * D * D * (4 + 4) * 2, "bfloat16": 2 * scores + 2 * rows * D * D}
  text = explanation.table("fp8")
  assert "not in FP8" in str(explanation)
  assert "two activations" in text
  assert "last layer" in text
  assert "not in FP8" not in str(mpjax.explain(apply, variables, SEQUENCE, policy="bf16"))
