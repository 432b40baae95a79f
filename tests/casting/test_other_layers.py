"""Autocast over every layer of Equinox and of Haiku."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.casting._conformance import Case, check, check_traced, filled, normal, product

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

KEY = jax.random.key(0)
X = normal(3, 8)
LINES, IMAGES, VOLUMES = normal(2, 4, 6), normal(2, 4, 6, 6), normal(2, 4, 3, 3, 3)  # channels first
CARRY = normal(3, 6, seed=1)
SEQUENCES = normal(2, 4, 8)  # [B, T, D]
TOKENS = np.array([[1, 0, 4], [4, 4, 2]])


def equinox(make: Callable[[], Any], *batch: Any, **options: Any) -> Case:
  """The module's arrays as arguments; its calls, mapped over the batch, behind a matrix product."""
  params, static = eqx.partition(eqx.filter_eval_shape(make), lambda x: isinstance(x, jax.ShapeDtypeStruct))

  def apply(params: Any, *batch: Any) -> Any:
    module = eqx.combine(params, static)
    return jax.vmap(module)(*jax.tree.map(product, batch))

  return Case(lambda cast: cast(apply), (filled(params), *batch), **options)


def stateful(make: Callable[[], Any], batch: Any, **options: Any) -> Case:
  """The same for a module with state, which comes out too."""
  module, state = eqx.nn.make_with_state(make)()
  params, static = eqx.partition(module, eqx.is_array)

  def apply(params: Any, state: Any, batch: Any) -> Any:
    module = eqx.combine(params, static)
    return jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(product(batch), state)

  return Case(lambda cast: cast(apply), (params, state, batch), **options)


nn = eqx.nn
EQUINOX: dict[str, Callable[[], Case]] = {
  **{f"{name}{n}d": lambda name = name, n = n, x = x: equinox(lambda: getattr(nn, f"{name}{n}d")(2), x) for n,
    x in ((1, LINES), (2, IMAGES), (3, VOLUMES)) for name in
    ("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "MaxPool")},
  **{f"{name}{n}d": lambda name = name, n = n, x = x: equinox(lambda:
    getattr(nn, f"{name}{n}d")(4, 2, 2, key=KEY), x) for n, x in ((1, LINES), (2, IMAGES), (3, VOLUMES)) for
    name in ("Conv", "ConvTranspose")},
  "AdaptivePool": lambda: equinox(lambda: nn.AdaptivePool((2,), 1, jnp.max), LINES),
  "BatchNorm": lambda: stateful(lambda: nn.BatchNorm(8, "batch", mode="batch"), X),
  "BatchNorm ema": lambda: stateful(lambda: nn.BatchNorm(8, "batch", mode="ema"), X),
  "Conv": lambda: equinox(lambda: nn.Conv(1, 4, 6, 3, groups=2, key=KEY), LINES),
  "ConvTranspose": lambda: equinox(lambda: nn.ConvTranspose(1, 4, 2, 3, stride=2, key=KEY), LINES),
  "Dropout": lambda: equinox(lambda: Keyed(nn.Dropout(0.5)), X),
  "Embedding": lambda: equinox(lambda: nn.Embedding(5, 6, key=KEY), TOKENS[0]),
  "GRUCell": lambda: equinox(lambda: nn.GRUCell(8, 6, key=KEY), X, CARRY),
  "GroupNorm": lambda: equinox(lambda: nn.GroupNorm(2, 4), IMAGES),
  "Identity": lambda: equinox(nn.Identity, X),
  "LSTMCell": lambda: equinox(lambda: nn.LSTMCell(8, 6, key=KEY), X, (CARRY, -CARRY)),
  "Lambda": lambda: equinox(lambda: nn.Lambda(jax.nn.gelu), X),
  "LayerNorm": lambda: equinox(lambda: nn.LayerNorm(8), X),
  "Linear": lambda: equinox(lambda: nn.Linear(8, 6, key=KEY), X),
  "MLP": lambda: equinox(lambda: nn.MLP(8, 3, 6, 2, activation=jax.nn.gelu, key=KEY), X),
  "MLP scan": lambda: equinox(lambda: nn.MLP(8, 3, 6, 3, scan=True, key=KEY), X),
  "MultiheadAttention": lambda: equinox(lambda: nn.MultiheadAttention(2, 8, key=KEY, use_query_bias=True),
    SEQUENCES, SEQUENCES, SEQUENCES),
  "PReLU": lambda: equinox(lambda: nn.PReLU(), X),
  "Pool": lambda: equinox(lambda: nn.Pool(0.0, jax.lax.add, 1, 2), LINES),
  "RMSNorm": lambda: equinox(lambda: nn.RMSNorm(8), X),
  "RotaryPositionalEmbedding": lambda: equinox(lambda: nn.RotaryPositionalEmbedding(8), SEQUENCES),
  "Sequential": lambda: equinox(lambda: nn.Sequential([nn.Linear(8, 6, key=KEY), nn.Lambda(jax.nn.silu),
    nn.LayerNorm(6)]), X),
  "Shared": lambda: equinox(Tied, TOKENS),
  "SpectralNorm": lambda: stateful(lambda: nn.SpectralNorm(nn.Linear(8, 6, key=KEY), "weight", key=KEY), X),
  "WeightNorm": lambda: equinox(lambda: nn.WeightNorm(nn.Linear(8, 6, key=KEY)), X),
}  # fmt: skip
EQUINOX_EXCLUDED = {
  "State": "holds state, has no call",
  "StateIndex": "holds state, has no call",
  "StatefulLayer": "abstract",
}


class Keyed(eqx.Module):
  """A layer that draws from a key."""

  layer: Any

  def __call__(self, x):
    return self.layer(x, key=KEY)


class Tied(eqx.Module):
  """An embedding whose matrix is the last layer's too."""

  shared: Any

  def __init__(self):
    layers = (nn.Embedding(5, 6, key=KEY), nn.Linear(6, 5, key=KEY))
    self.shared = nn.Shared(layers, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)

  def __call__(self, tokens):
    embed, linear = self.shared()
    return jax.vmap(lambda token: linear(jnp.tanh(embed(token))))(tokens)


def haiku(function: Callable[..., Any], *args: Any, **options: Any) -> Case:
  """`function`, which makes and calls modules, behind a matrix product; its new state comes out too."""
  transformed = hk.transform_with_state(function)
  params, state = jax.eval_shape(lambda: transformed.init(KEY, *args))

  def apply(params: Any, state: Any, *args: Any) -> Any:
    return transformed.apply(params, state, KEY, *jax.tree.map(product, args))

  return Case(lambda cast: cast(apply), (filled(params), filled(state), *args), **options)


def unrolled(core: Callable[[], Any], *args: Any) -> Case:
  """A recurrent core over a sequence, by `hk.dynamic_unroll`."""

  def function(x: Any) -> Any:
    made = core()
    return hk.dynamic_unroll(made, x, made.initial_state(jax.tree.leaves(x)[0].shape[1]))

  return haiku(function, *args)


CHANNELS_LAST = {1: normal(2, 6, 4), 2: normal(2, 6, 6, 4), 3: normal(2, 3, 3, 3, 4)}
TIME_MAJOR = normal(4, 2, 8)  # [T, B, D]
TREE = {"layer": {"w": normal(4, 3)}}
HAIKU: dict[str, Callable[[], Case]] = {
  **{f"{name}{n}D{suffix}": lambda n = n, name = name, suffix = suffix:
    haiku(lambda x: getattr(hk, f"{name}{n}D{suffix}")(2, 3)(x), CHANNELS_LAST[n]) for n in (1, 2, 3) for
    name, suffix in (("Conv", ""), ("Conv", "Transpose"), ("DepthwiseConv", ""))},
  **{f"Conv{n}DLSTM": lambda n = n: unrolled(lambda: getattr(hk,
    f"Conv{n}DLSTM")(CHANNELS_LAST[n].shape[1:-1], 2, 2), CHANNELS_LAST[n][:, None]) for n in (1, 2, 3)},
  **{name: lambda name = name: unrolled(lambda: getattr(hk, name)(6), TIME_MAJOR) for name in
    ("GRU", "LSTM", "VanillaRNN")},
  "AvgPool": lambda: haiku(lambda x: hk.AvgPool((1, 2, 2, 1), (1, 2, 2, 1), "SAME")(x), CHANNELS_LAST[2]),
  "BatchNorm": lambda: haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True), X),
  "BatchNorm local": lambda: haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, False, test_local_stats=True),
    X),
  "Bias": lambda: haiku(lambda x: hk.Bias()(x), X),
  "ConvND": lambda: haiku(lambda x: hk.ConvND(1, 2, 3)(x), CHANNELS_LAST[1]),
  "ConvNDTranspose": lambda: haiku(lambda x: hk.ConvNDTranspose(1, 2, 3)(x), CHANNELS_LAST[1]),
  "DeepRNN": lambda: unrolled(lambda: hk.DeepRNN([hk.LSTM(6), jnp.tanh, hk.GRU(4)]), TIME_MAJOR),
  "EMAParamsTree": lambda: haiku(lambda tree: hk.EMAParamsTree(0.9)(tree), TREE),
  "Embed": lambda: haiku(lambda tokens: hk.Embed(5, 6)(tokens), TOKENS),
  "Embed one-hot": lambda: haiku(lambda tokens: hk.Embed(5, 6, lookup_style="ONE_HOT")(tokens), TOKENS),
  "ExponentialMovingAverage": lambda: haiku(lambda x: hk.ExponentialMovingAverage(0.9)(x), X),
  "Flatten": lambda: haiku(lambda x: hk.Flatten()(x), SEQUENCES),
  "GroupNorm": lambda: haiku(lambda x: hk.GroupNorm(2)(x), CHANNELS_LAST[2]),
  "IdentityCore": lambda: unrolled(hk.IdentityCore, TIME_MAJOR),
  "InstanceNorm": lambda: haiku(lambda x: hk.InstanceNorm(True, True)(x), CHANNELS_LAST[2]),
  "LayerNorm": lambda: haiku(lambda x: hk.LayerNorm(-1, True, True)(x), X),
  "Linear": lambda: haiku(lambda x: hk.Linear(6)(x), X),
  "MaxPool": lambda: haiku(lambda x: hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "SAME")(x), CHANNELS_LAST[2]),
  "MultiHeadAttention": lambda: haiku(lambda x: hk.MultiHeadAttention(2, 4,
    w_init=hk.initializers.VarianceScaling())(x, x, x), SEQUENCES),
  "RMSNorm": lambda: haiku(lambda x: hk.RMSNorm(-1)(x), X),
  "ResetCore": lambda: unrolled(lambda: hk.ResetCore(hk.LSTM(6)),
    (TIME_MAJOR, np.arange(8).reshape(4, 2) % 3 == 0)),
  "Reshape": lambda: haiku(lambda x: hk.Reshape((-1,))(x), SEQUENCES),
  "SNParamsTree": lambda: haiku(lambda tree: hk.SNParamsTree()(tree), TREE),
  "SeparableDepthwiseConv2D": lambda: haiku(lambda x: hk.SeparableDepthwiseConv2D(2, 3)(x), CHANNELS_LAST[2]),
  "Sequential": lambda: haiku(lambda x: hk.Sequential([hk.Linear(6), jax.nn.gelu,
    hk.LayerNorm(-1, True, True), hk.Linear(2)])(x), X),
  "SpectralNorm": lambda: haiku(lambda x: hk.SpectralNorm()(x), X),
}  # fmt: skip
HAIKU_EXCLUDED = {"Module": "abstract", "RNNCore": "abstract"}


TABLES = {"equinox": EQUINOX, "haiku": HAIKU}
# Each primitive in each pass once, and what has state.
COMPILED = {
  "equinox": "AdaptiveAvgPool2d, AdaptiveMaxPool1d, MaxPool2d, ConvTranspose2d, BatchNorm, BatchNorm ema, Dropout, "
  "GRUCell, MLP scan, MultiheadAttention, RotaryPositionalEmbedding, Shared, SpectralNorm",
  "haiku": "Conv2DLSTM, LSTM, BatchNorm, EMAParamsTree, Embed one-hot, ExponentialMovingAverage, MaxPool, "
  "MultiHeadAttention, ResetCore, SNParamsTree, SeparableDepthwiseConv2D",
}


@pytest.mark.parametrize("table", TABLES)
def test_lists_dtypes_and_products_of_every_layer(table):
  check_traced(TABLES[table])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("table", "name"), [(table, name) for table in COMPILED for name in COMPILED[table].split(", ")]
)
def test_values_gradients_and_state(table, name):
  check(TABLES[table][name]())


@pytest.mark.parametrize(
  ("library", "base", "table", "excluded"),
  [(eqx.nn, object, EQUINOX, EQUINOX_EXCLUDED), (hk, hk.Module, HAIKU, HAIKU_EXCLUDED)],
  ids=["equinox", "haiku"],
)
def test_every_layer_is_in_the_table(library, base, table, excluded):
  layers = {name for name, cls in vars(library).items() if inspect.isclass(cls) and issubclass(cls, base)}
  assert layers == {name for name in [*table, *excluded] if " " not in name}
