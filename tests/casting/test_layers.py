"""Autocast over every layer of flax.linen and flax.nnx: lists, dtypes and products."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests.casting._conformance import Case, check_traced, filled, normal, product

KEY = jax.random.key(0)
X, CARRY = normal(3, 8), normal(3, 6, seed=1)
SEQUENCES = normal(2, 4, 8)  # [B, T, D]
IMAGES = normal(2, 5, 5, 4)  # NHWC
TOKENS = np.array([[1, 0, 4], [4, 4, 2]])
Rows = dict[str, Callable[[], Case]]
Make = Callable[..., Any]


def rows(
  case: Callable[..., Case], library: Any, names: str, *args: Any, of: Any = (X,), **options: Any
) -> Rows:
  """Cases of layers that are made of the same arguments and called `of` the same, built when they are needed."""
  layer = lambda name: lambda **more: getattr(library, name)(*args, **options, **more)
  return {name: functools.partial(case, layer(name), *of) for name in names.split()}


def in_linen(make: Make, *args: Any, call: dict[str, Any] | None = None, **options: Any) -> Case:
  """`module.apply` behind a matrix product, with every collection mutable."""
  module, call = make(), call or {}
  rngs = {"params": KEY, "dropout": jax.random.key(1)}
  variables = jax.eval_shape(lambda: module.init(rngs, *args, **call))

  def apply(variables: Any, *args: Any) -> Any:
    return module.apply(variables, *jax.tree.map(product, args), **call, rngs=rngs, mutable=True)

  return Case(lambda cast: cast(apply), (filled(variables), *args), **options)


class Lifted(linen.Module):
  """Layers under lifted transforms."""

  @linen.compact
  def __call__(self, x):
    parts = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    x = linen.vmap(linen.Dense, in_axes=None, axis_size=2, **parts)(8)(x).mean(0)
    layers = linen.scan(linen.SimpleCell, variable_broadcast="params", split_rngs={"params": False})
    return layers(8)(linen.remat(linen.Dense)(8)(x), jnp.stack([x, x]))[0]


of_linen = functools.partial(rows, in_linen, linen)
as_linen = lambda make, *args, **options: lambda: in_linen(make, *args, **options)
LINEN: Rows = {
  **of_linen("BatchNorm", use_running_average=False, of=(IMAGES,)),
  **of_linen("Conv ConvLocal ConvTranspose", 3, (3, 3), strides=(2, 2), of=(IMAGES,)),
  **of_linen("ConvLSTMCell", 3, (3, 3), of=((normal(2, 5, 5, 3), normal(2, 5, 5, 3, seed=1)), IMAGES)),
  **of_linen("Dense", 6),
  **of_linen("DenseGeneral", (2, 3), axis=(-2, -1), of=(SEQUENCES,)),
  **of_linen("Dropout", 0.5, deterministic=False),
  **of_linen("Einsum", (8, 6), "ab,bc->ac"),
  **of_linen("Embed", 5, 6, of=(TOKENS,)),
  **of_linen("GRUCell MGUCell SimpleCell", 6, of=(CARRY, X)),
  **of_linen("GroupNorm", num_groups=2, of=(IMAGES,)),
  **of_linen("InstanceNorm", of=(IMAGES,)),
  **of_linen("LSTMCell OptimizedLSTMCell", 6, of=((CARRY, -CARRY), X)),
  **of_linen("LayerNorm PReLU RMSNorm"),
  **of_linen("MultiHeadDotProductAttention", num_heads=2, of=(SEQUENCES, SEQUENCES[:, :3] + 1)),
  **of_linen("WeightNorm", linen.Dense(6)),
  **of_linen("Sequential", [linen.Dense(6), linen.gelu, linen.LayerNorm(), linen.Dense(2)]),
  **of_linen("Bidirectional", linen.RNN(linen.LSTMCell(6)), linen.RNN(linen.GRUCell(6)), of=(SEQUENCES,)),
  **of_linen("RNN", linen.OptimizedLSTMCell(6), return_carry=True, of=(SEQUENCES,)),
  # Values are rounded to FP8, which a rounding to half precision before it moves by a step of FP8.
  **{name: as_linen(functools.partial(linen.Dense, 6, dot_general_cls=getattr(linen, name)), X)
    for name in ("Fp8DirectDotGeneralOp", "Fp8DotGeneral")},
  "BatchNorm evaluation": as_linen(lambda: linen.BatchNorm(use_running_average=True), IMAGES),
  "MultiHeadAttention": as_linen(lambda: linen.MultiHeadAttention(2, dropout_rate=0.2, deterministic=False),
    SEQUENCES, call={"mask": linen.make_causal_mask(np.ones((2, 4)))}),
  "RNN lengths": as_linen(lambda: linen.RNN(linen.GRUCell(6), reverse=True, keep_order=True), SEQUENCES,
    call={"seq_lengths": np.array([2, 4])}),
  "SpectralNorm": as_linen(lambda: linen.SpectralNorm(linen.Dense(6)), X, call={"update_stats": True}),
  "lifted transforms": as_linen(Lifted, X),
}  # fmt: skip


def in_nnx(make: Make, *args: Any) -> Case:
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

  return Case(build, (filled(state), *args))


of_nnx = functools.partial(rows, in_nnx, nnx)
as_nnx = lambda make, *args: lambda: in_nnx(make, *args)
NNX: Rows = {
  **of_nnx("BatchNorm InstanceNorm", 4, of=(IMAGES,)),
  **of_nnx("Conv ConvTranspose", 4, 3, (3, 3), strides=2, of=(IMAGES,)),
  **of_nnx("Dropout", 0.5),
  **of_nnx("Einsum", "ab,bc->ac", (8, 6), (6,)),
  **of_nnx("Embed", 5, 6, of=(TOKENS,)),
  **of_nnx("GRUCell SimpleCell", 8, 6, of=(CARRY, X)),
  **of_nnx("GroupNorm", 4, num_groups=2, of=(IMAGES,)),
  **of_nnx("LSTMCell OptimizedLSTMCell", 8, 6, of=((CARRY, -CARRY), X)),
  **of_nnx("LayerNorm RMSNorm", 8),
  **of_nnx("Linear", 8, 6),
  **of_nnx("LinearGeneral", (4, 8), (2, 3), axis=(-2, -1), of=(SEQUENCES,)),
  **of_nnx("LoRA", 8, 2, 6),
  **of_nnx("LoRALinear", 8, 6, lora_rank=2),
  **of_nnx("MultiHeadAttention", 2, 8, dropout_rate=0.2, deterministic=False, decode=False, normalize_qk=True,
    of=(SEQUENCES,)),
  "PReLU": as_nnx(lambda rngs: nnx.PReLU(), X),
  "RNN": as_nnx(lambda rngs: nnx.RNN(nnx.LSTMCell(8, 6, rngs=rngs), rngs=rngs), SEQUENCES),
  "Bidirectional": as_nnx(lambda rngs: nnx.Bidirectional(nnx.RNN(nnx.GRUCell(8, 6, rngs=rngs)),
    nnx.RNN(nnx.SimpleCell(8, 6, rngs=rngs)), rngs=rngs), SEQUENCES),
  "Sequential": as_nnx(lambda rngs: nnx.Sequential(nnx.Linear(8, 6, rngs=rngs), nnx.gelu,
    nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)), X),
  "SpectralNorm": as_nnx(lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 6, rngs=rngs), update_stats=True, rngs=rngs), X),
  "WeightNorm": as_nnx(lambda rngs: nnx.WeightNorm(nnx.Linear(8, 6, rngs=rngs), rngs=rngs), X),
}  # fmt: skip


TABLES = {"linen": LINEN, "nnx": NNX}
# Containers, what is abstract, deprecated (nnx.RoPE calls what is), or for one GPU.
EXCLUDED = {
  "linen": "Fp8DotGeneralOp Fp8Einsum Module NANOOFp8DotGeneralOp RNNCellBase SelfAttention",
  "nnx": "Dict List Module RNNCellBase" + " RoPE" * hasattr(nnx, "RoPE"),
}


@pytest.mark.parametrize("table", TABLES)
def test_lists_dtypes_and_products_of_every_layer(table):
  check_traced(TABLES[table])


@pytest.mark.parametrize(("table", "library"), [("linen", linen), ("nnx", nnx)])
def test_every_layer_is_in_the_table(table, library):
  layers = {
    name for name, cls in vars(library).items() if inspect.isclass(cls) and issubclass(cls, library.Module)
  }
  assert layers == {name for name in [*TABLES[table], *EXCLUDED[table].split()] if " " not in name}
