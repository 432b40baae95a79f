"""Autocast over every layer of flax.linen and flax.nnx, used as Flax's users use them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import mpjax
from tests.casting._conformance import Case, check, check_traced, filled, normal, product

X = normal(3, 8)
SEQUENCES = normal(2, 4, 8)  # [B, T, D]
IMAGES = normal(2, 5, 5, 4)  # NHWC
CARRY = normal(3, 6, seed=1)
TOKENS = np.array([[1, 0, 4], [4, 4, 2]])


def linen(module: nn.Module, *args: Any, **kwargs: Any) -> Case:
  """`module.apply` behind a matrix product, with every collection mutable."""
  options = {name: kwargs.pop(name) for name in ("grad", "slack", "grad_slack") if name in kwargs}
  rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = jax.eval_shape(lambda: module.init(rngs, *args, **kwargs))

  def apply(variables: Any, *args: Any) -> Any:
    args = jax.tree.map(product, args)
    return module.apply(variables, *args, **kwargs, rngs={"dropout": jax.random.key(1)}, mutable=True)

  return Case(lambda cast: cast(apply), (filled(variables), *args), **options)


class Stack(nn.Module):
  """Layers under lifted transforms."""

  @nn.compact
  def __call__(self, x):
    dense = nn.vmap(
      nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2
    )
    x = nn.remat(nn.Dense)(8)(dense(8)(x).mean(0))
    layers = nn.scan(nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False})
    carry, _ = layers(8)(x, jnp.stack([x, x]))
    return carry


LINEN: dict[str, Callable[[], Case]] = {
  "BatchNorm": lambda: linen(nn.BatchNorm(use_running_average=False), IMAGES),
  "BatchNorm evaluation": lambda: linen(nn.BatchNorm(use_running_average=True), IMAGES),
  "Bidirectional": lambda: linen(nn.Bidirectional(nn.RNN(nn.LSTMCell(6)), nn.RNN(nn.GRUCell(6))), SEQUENCES),
  "Conv": lambda: linen(nn.Conv(3, (3, 3), strides=2), IMAGES),
  "Conv grouped and dilated": lambda: linen(nn.Conv(4, (3, 3), feature_group_count=2, kernel_dilation=2),
    IMAGES),
  "ConvLSTMCell": lambda: linen(nn.ConvLSTMCell(3, (3, 3)), (normal(2, 5, 5, 3), normal(2, 5, 5, 3, seed=1)),
    IMAGES),
  "ConvLocal": lambda: linen(nn.ConvLocal(3, (3, 3)), IMAGES),
  "ConvTranspose": lambda: linen(nn.ConvTranspose(3, (3, 3), strides=(2, 2)), IMAGES),
  "Dense": lambda: linen(nn.Dense(6), X),
  "DenseGeneral": lambda: linen(nn.DenseGeneral((2, 3), axis=(-2, -1)), SEQUENCES),
  "Dropout": lambda: linen(nn.Dropout(0.5, deterministic=False), X),
  "Einsum": lambda: linen(nn.Einsum((8, 6), "ab,bc->ac"), X),
  "Embed": lambda: linen(nn.Embed(5, 6), TOKENS),
  # Values are rounded to FP8, which a rounding to half precision before it moves by a step of FP8.
  **{name: lambda name = name: linen(nn.Dense(6, dot_general_cls=getattr(nn, name)), X, slack=4, grad_slack=4)
    for name in ("Fp8DirectDotGeneralOp", "Fp8DotGeneral")},
  "GRUCell": lambda: linen(nn.GRUCell(6), CARRY, X),
  "GroupNorm": lambda: linen(nn.GroupNorm(num_groups=2), IMAGES),
  "InstanceNorm": lambda: linen(nn.InstanceNorm(), IMAGES),
  "LSTMCell": lambda: linen(nn.LSTMCell(6), (CARRY, -CARRY), X),
  "LayerNorm": lambda: linen(nn.LayerNorm(), X),
  "MGUCell": lambda: linen(nn.MGUCell(6), CARRY, X),
  "MultiHeadAttention": lambda: linen(nn.MultiHeadAttention(num_heads=2, dropout_rate=0.2,
    deterministic=False), SEQUENCES, mask=nn.make_causal_mask(np.ones((2, 4)))),
  "MultiHeadDotProductAttention": lambda: linen(nn.MultiHeadDotProductAttention(num_heads=2), SEQUENCES,
    SEQUENCES[:, :3] + 1),
  "OptimizedLSTMCell": lambda: linen(nn.OptimizedLSTMCell(6), (CARRY, -CARRY), X),
  "PReLU": lambda: linen(nn.PReLU(), X),
  "RMSNorm": lambda: linen(nn.RMSNorm(), X),
  "RNN": lambda: linen(nn.RNN(nn.OptimizedLSTMCell(6), return_carry=True), SEQUENCES),
  "RNN lengths": lambda: linen(nn.RNN(nn.GRUCell(6), reverse=True, keep_order=True), SEQUENCES,
    seq_lengths=np.array([2, 4])),
  "Sequential": lambda: linen(nn.Sequential([nn.Dense(6), nn.gelu, nn.LayerNorm(), nn.Dense(2)]), X),
  "SimpleCell": lambda: linen(nn.SimpleCell(6), CARRY, X),
  "SpectralNorm": lambda: linen(nn.SpectralNorm(nn.Dense(6)), X, update_stats=True),
  "WeightNorm": lambda: linen(nn.WeightNorm(nn.Dense(6)), X),
  "lifted transforms": lambda: linen(Stack(), X),
}  # fmt: skip
LINEN_EXCLUDED = {
  "Fp8DotGeneralOp": "deprecated",
  "Fp8Einsum": "the product of Fp8DirectDotGeneralOp as an einsum",
  "Module": "abstract",
  "NANOOFp8DotGeneralOp": "only for the FP8 types of one GPU",
  "RNNCellBase": "abstract",
  "SelfAttention": "deprecated",
}


def in_nnx(make: Callable[..., nnx.Module], *args: Any, **options: Any) -> Case:
  """The module as an argument, behind a matrix product, and as the function itself; both with their new state."""
  graphdef, state = jax.eval_shape(lambda: nnx.split(make(rngs=nnx.Rngs(0))))

  def build(cast: Callable[..., Any]) -> Callable[..., Any]:
    def fun(state: Any, *args: Any) -> Any:
      argument, function = nnx.merge(graphdef, state), nnx.merge(graphdef, state)
      apply = cast(lambda module, *args: module(*jax.tree.map(product, args)))
      return {
        "as_argument": apply(argument, *args),
        "as_function": cast(function)(*args),
        "state": (nnx.state(argument), nnx.state(function)),
      }

    return fun

  return Case(build, (filled(state), *args), **options)


NNX: dict[str, Callable[[], Case]] = {
  "BatchNorm": lambda: in_nnx(lambda rngs: nnx.BatchNorm(4, rngs=rngs), IMAGES),
  "Bidirectional": lambda: in_nnx(lambda rngs: nnx.Bidirectional(nnx.RNN(nnx.GRUCell(8, 6, rngs=rngs)),
    nnx.RNN(nnx.SimpleCell(8, 6, rngs=rngs)), rngs=rngs), SEQUENCES),
  "Conv": lambda: in_nnx(lambda rngs: nnx.Conv(4, 3, (3, 3), strides=2, rngs=rngs), IMAGES),
  "ConvTranspose": lambda: in_nnx(lambda rngs: nnx.ConvTranspose(4, 3, (3, 3), rngs=rngs), IMAGES),
  "Dropout": lambda: in_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs), X),
  "Einsum": lambda: in_nnx(lambda rngs: nnx.Einsum("ab,bc->ac", (8, 6), (6,), rngs=rngs), X),
  "Embed": lambda: in_nnx(lambda rngs: nnx.Embed(5, 6, rngs=rngs), TOKENS),
  "GRUCell": lambda: in_nnx(lambda rngs: nnx.GRUCell(8, 6, rngs=rngs), CARRY, X),
  "GroupNorm": lambda: in_nnx(lambda rngs: nnx.GroupNorm(4, num_groups=2, rngs=rngs), IMAGES),
  "InstanceNorm": lambda: in_nnx(lambda rngs: nnx.InstanceNorm(4, rngs=rngs), IMAGES),
  "LSTMCell": lambda: in_nnx(lambda rngs: nnx.LSTMCell(8, 6, rngs=rngs), (CARRY, -CARRY), X),
  "LayerNorm": lambda: in_nnx(lambda rngs: nnx.LayerNorm(8, rngs=rngs), X),
  "Linear": lambda: in_nnx(lambda rngs: nnx.Linear(8, 6, rngs=rngs), X),
  "LinearGeneral": lambda: in_nnx(lambda rngs: nnx.LinearGeneral((4, 8), (2, 3), axis=(-2, -1), rngs=rngs),
    SEQUENCES),
  "LoRA": lambda: in_nnx(lambda rngs: nnx.LoRA(8, 2, 6, rngs=rngs), X),
  "LoRALinear": lambda: in_nnx(lambda rngs: nnx.LoRALinear(8, 6, lora_rank=2, rngs=rngs), X),
  "MultiHeadAttention": lambda: in_nnx(lambda rngs: nnx.MultiHeadAttention(2, 8, dropout_rate=0.2,
    deterministic=False, decode=False, normalize_qk=True, rngs=rngs), SEQUENCES),
  "OptimizedLSTMCell": lambda: in_nnx(lambda rngs: nnx.OptimizedLSTMCell(8, 6, rngs=rngs), (CARRY, -CARRY),
    X),
  "PReLU": lambda: in_nnx(lambda rngs: nnx.PReLU(), X),
  "RMSNorm": lambda: in_nnx(lambda rngs: nnx.RMSNorm(8, rngs=rngs), X),
  "RNN": lambda: in_nnx(lambda rngs: nnx.RNN(nnx.LSTMCell(8, 6, rngs=rngs), rngs=rngs), SEQUENCES),
  "Sequential": lambda: in_nnx(lambda rngs: nnx.Sequential(nnx.Linear(8, 6, rngs=rngs), nnx.gelu,
    nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)), X),
  "SimpleCell": lambda: in_nnx(lambda rngs: nnx.SimpleCell(8, 6, rngs=rngs), CARRY, X),
  "SpectralNorm": lambda: in_nnx(lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 6, rngs=rngs), update_stats=True,
    rngs=rngs), X),
  "WeightNorm": lambda: in_nnx(lambda rngs: nnx.WeightNorm(nnx.Linear(8, 6, rngs=rngs), rngs=rngs), X),
}  # fmt: skip
NNX_EXCLUDED = {
  "Dict": "a container without a call",
  "List": "a container without a call",
  "Module": "abstract",
  "RNNCellBase": "abstract",
}
if hasattr(nnx, "RoPE"):  # of later releases
  NNX_EXCLUDED["RoPE"] = "calls what flax itself has deprecated, and a warning is an error here"


# Each primitive of linen's layers and of nnx's in each pass once, and what has state or a dtype of its own.
COMPILED = {
  "linen": "BatchNorm, ConvLSTMCell, Dropout, Embed, Fp8DirectDotGeneralOp, MultiHeadAttention, RNN lengths, "
  "SpectralNorm, lifted transforms",
  "nnx": "Bidirectional, Conv, Dropout, LoRALinear, MultiHeadAttention, Sequential, SpectralNorm",
}
TABLES = {"linen": LINEN, "nnx": NNX}


@pytest.mark.parametrize("table", TABLES)
def test_lists_dtypes_and_products_of_every_layer(table):
  check_traced(TABLES[table])


@pytest.mark.parametrize(
  ("table", "name"), [(table, name) for table in COMPILED for name in COMPILED[table].split(", ")]
)
def test_values_gradients_and_state(table, name):
  check(TABLES[table][name]())


@pytest.mark.parametrize(
  ("library", "base", "table", "excluded"),
  [(nn, nn.Module, LINEN, LINEN_EXCLUDED), (nnx, nnx.Module, NNX, NNX_EXCLUDED)],
  ids=["linen", "nnx"],
)
def test_every_layer_is_in_the_table(library, base, table, excluded):
  layers = {name for name, cls in vars(library).items() if inspect.isclass(cls) and issubclass(cls, base)}
  assert layers == {name for name in [*table, *excluded] if " " not in name}


# The caller's nnx module.


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 6, rngs=rngs)
    self.norm = nnx.BatchNorm(6, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(nnx.relu(self.norm(self.linear(x))))


def in_gradient(module: Net, x: Any, policy: str) -> Any:
  def loss(module):
    y = mpjax.autocast(lambda module, x: module(x), policy)(module, x)
    return y.sum(), y

  (_, y), grads = nnx.value_and_grad(loss, has_aux=True)(module)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
  return y


call = lambda module, x: module(x)
WAYS = {
  "argument": lambda module, x, policy: mpjax.autocast(call, policy)(module, x),
  "function": lambda module, x, policy: mpjax.autocast(module, policy)(x),
  "method": lambda module, x, policy: mpjax.autocast(module.__call__, policy)(x),
  "in jit": lambda module, x, policy: nnx.jit(mpjax.autocast(call, policy))(module, x),
  "around jit": lambda module, x, policy: mpjax.autocast(nnx.jit(call), policy)(module, x),
  "in gradient": in_gradient,
}


def test_statistics_and_random_streams_of_the_callers_module_move_as_in_float32():
  graph, state = nnx.split(Net(nnx.Rngs(0)))

  def twice(module, way, *policy):
    outs = [way(module, X, *policy) for _ in range(2)]
    assert nnx.graphdef(module) == graph
    return outs, [module.norm.mean[...], module.norm.var[...]], module.dropout.rngs.count[...]

  @jax.jit
  def all_of_them(state):
    made = lambda: nnx.merge(graph, state, copy=True)
    return {way: twice(made(), WAYS[way], "fp16") for way in WAYS}, twice(made(), call)

  found, (wanted, expected, _) = all_of_them(state)
  for way, (outs, moved, count) in found.items():
    for got, want in zip(outs, wanted, strict=True):
      assert got.dtype == np.float32, way
      np.testing.assert_allclose(got, want, atol=0.06, err_msg=way)
    for got, want, first in zip(moved, expected, (0, 1), strict=True):
      assert got.dtype == np.float32, way
      np.testing.assert_allclose(got, want, atol=0.01, err_msg=way)
      assert not np.allclose(got, first, atol=1e-3), way
    assert int(count) == 2, way


@pytest.mark.parametrize("transform", [nnx.jit, mpjax.autocast], ids=["nnx.jit", "autocast"])
def test_a_module_that_is_closed_over_cannot_be_mutated(transform):
  module = Net(nnx.Rngs(0))
  with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate BatchStat"):
    transform(lambda x: module(x))(X)
