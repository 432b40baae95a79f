"""Products of bfloat16 and float16, and their gradients, are as exact under `jit` as one rounding allows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests.casting._jaxprs import equations

pytestmark = pytest.mark.optimised  # rounding is what is tested

ROUNDING = {"bfloat16": 0.0017, "float16": 0.00022}  # of numbers of any size, relative, root mean square
X3, X4 = (4, 64, 64), (4, 8, 8, 64)


def dot(lhs, rhs, lhs_batch=(), rhs_batch=()):
  return lambda x, w: lax.dot_general(x, w, ((lhs, rhs), (lhs_batch, rhs_batch)))


def einsum(formula):
  return lambda x, w: jnp.einsum(formula, x, w)


def conv(x, w):
  return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def scanned(x, w):
  return lax.scan(lambda total, row: (total + row @ w, None), jnp.zeros((64, 96)), x)[0]


PRODUCTS = {  # the function, shapes of its operands
  "dense of rank 2": (jnp.matmul, (256, 64), (64, 96)),
  "dense of rank 3": (jnp.matmul, X3, (64, 96)),
  "dense of rank 4": (jnp.matmul, X4, (64, 96)),
  "dense of a transposed weight": (lambda x, w: x @ w.T, X3, (96, 64)),
  "attend to a tied embedding": (dot((2,), (1,)), X3, (96, 64)),
  "query projection": (dot((2,), (0,)), X3, (64, 4, 32)),
  "output projection": (dot((2, 3), (0, 1)), (4, 64, 4, 32), (4, 32, 96)),
  "attention scores": (einsum("bqhd,bkhd->bhqk"), (4, 64, 4, 32), (4, 48, 4, 32)),
  "attention values": (einsum("bhqk,bkhd->bqhd"), (4, 4, 64, 48), (4, 48, 4, 32)),
  "experts": (einsum("ecd,edf->ecf"), X3, (4, 64, 96)),
  "convolution": (conv, (4, 8, 8, 32), (3, 3, 32, 48)),
  "vmap": (jax.vmap(jnp.matmul, (0, None)), X4, (64, 96)),
  "vmap of weights": (jax.vmap(jnp.matmul), X4, (4, 64, 96)),
  "scan": (scanned, X3, (64, 96)),
  "checkpoint": (jax.checkpoint(jnp.matmul), X3, (64, 96)),
}


def operands(shapes, dtype):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  # Numbers that the compute dtype has, so that no cast rounds.
  return [
    jax.random.normal(k, s).astype(dtype).astype(jnp.float32) for k, s in zip(keys, shapes, strict=True)
  ]


def gradients(fun, x, w, ct):
  return jax.vjp(fun, x, w)[1](ct)


def in_order(order, fun, policy):
  if order == "grad(autocast)":
    return lambda x, w, ct: gradients(mpjax.autocast(fun, policy), x, w, ct)
  return mpjax.autocast(lambda *args: gradients(fun, *args), policy)


def relative_error(got, want):
  got, want = (np.asarray(x, np.float64) for x in (got, want))
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("order", "dtype"),
  [("grad(autocast)", "bfloat16"), ("autocast(grad)", "bfloat16"), ("grad(autocast)", "float16")],
)
def test_gradients_are_rounded_once(order, dtype):
  policy = f"params=float32,compute={dtype},output=float32"
  args = {}
  for name, (fun, *shapes) in PRODUCTS.items():
    args[name] = operands((*shapes, jax.eval_shape(fun, *operands(shapes, dtype)).shape), dtype)
  # One program, which compiles faster than many.
  full = jax.jit(lambda args: {name: gradients(PRODUCTS[name][0], *args[name]) for name in args})
  run = jax.jit(lambda args: {name: in_order(order, PRODUCTS[name][0], policy)(*args[name]) for name in args})
  found = jax.tree.map(relative_error, run(args), full(args))
  # A scan adds four gradients, each rounded; nothing else rounds more than once.
  most = {name: (2 if name == "scan" else 1.1) * ROUNDING[dtype] for name in found}
  assert {name: errors for name, errors in found.items() if max(errors) > most[name]} == {}


def test_gradients_of_shards_are_rounded_once():
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec
  split = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))
  x, w = operands((X3, (64, 96)), "bfloat16")
  (ct,) = operands([(4, 64, 96)], "bfloat16")
  got = jax.jit(in_order("grad(autocast)", split, "bf16"))(x, w, ct)
  for a, b in zip(got, gradients(jnp.matmul, x, w, ct), strict=True):
    assert relative_error(a, b) < 1.5 * ROUNDING["bfloat16"]  # four parts are added


def test_vmap_keeps_explicit_shardings():
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  spec = jax.sharding.PartitionSpec

  def loss(x, w):
    return jnp.sum(jnp.einsum("btd,df->btf", x, w, out_sharding=spec(None, None, "model")))

  def types(fun):
    return [jax.typeof(x) for x in jax.jit(jax.grad(lambda *args: jnp.sum(fun(*args)), (0, 1)))(x, w)]

  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((4, 2, 8, 16)), spec("data"))
    w = jax.device_put(jnp.ones((16, 8)), spec(None, "model"))
    rows = jax.vmap(mpjax.autocast(loss, "bf16"), (0, None))
    assert types(rows) == types(jax.vmap(loss, (0, None)))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_have_the_products_of_casts_by_hand(platform):
  names = ["dense of rank 3", "attend to a tied embedding", "attention scores", "vmap of weights"]
  for fun, *shapes in map(PRODUCTS.get, names):
    x, w = (a.astype(jnp.bfloat16) for a in operands(shapes, "bfloat16"))
    ct = fun(x, w)
    cast = mpjax.autocast(fun, "params=bfloat16,compute=bfloat16,output=bfloat16")
    by_hand, by_autocast = (
      jax.jit(functools.partial(gradients, f)).trace(x, w, ct).lower(lowering_platforms=(platform,)).as_text()
      for f in (fun, cast)
    )
    assert products(by_autocast) == products(by_hand)
    assert len(products(by_hand)) == 2


def products(text):
  """The products of a StableHLO module, without the names of values."""
  lines = [line for line in text.splitlines() if "dot_general" in line]
  return sorted(re.sub(r"%\w+", "", line).strip() for line in lines)


def test_policies_of_a_checkpoint_outside_save_products():
  def loss(x, w):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

  x, w = operands(((8, 64), (64, 64)), "bfloat16")
  saved = jax.checkpoint(mpjax.autocast(loss, "bf16"), policy=jax.checkpoint_policies.dots_saveable)
  names = [e.primitive.name for e in equations(jax.grad(saved, (0, 1)), x, w)]
  assert names.count("dot_general") == 6  # two forward, and two for each of them backward


def test_higher_derivatives():
  x, w = operands(((8, 16), (16, 4)), "bfloat16")

  def loss(x, w):
    return jnp.sum(jnp.square(x @ w)) / 100

  cast = mpjax.autocast(loss, "bf16")
  hessians = [jax.jit(jax.jacfwd(jax.jacrev(f, 1), 1))(x, w) for f in (cast, loss)]
  assert relative_error(hessians[0], hessians[1]) < 0.01
  push = [jax.jit(lambda x, w, f=f: jax.jvp(f, (x, w), (x, w))[1])(x, w) for f in (cast, loss)]
  assert relative_error(push[0], push[1]) < 0.01


def test_vmap_of_a_convolution_over_no_rows():
  conv = lambda k, x: jnp.sum(jax.lax.conv(x, k, (1, 1), "SAME"))
  grad = jax.vmap(jax.grad(mpjax.autocast(conv, "bf16")), (None, 0))
  out = jax.eval_shape(grad, jnp.zeros((5, 4, 3, 3)), jnp.zeros((0, 2, 4, 6, 6)))
  assert (out.shape, out.dtype) == ((0, 5, 4, 3, 3), jnp.float32)


def test_what_vmap_does_not_map_is_left_alone():
  x, w = operands(((8, 16), (16, 4)), "bfloat16")
  bias = jnp.zeros(4)

  def loss(bias, w):
    return jnp.sum(jnp.tanh(x @ w + bias) ** 2)

  cast = mpjax.autocast(loss, "bf16")
  hessians = [jax.hessian(f)(bias, w) for f in (cast, loss)]
  assert relative_error(hessians[0], hessians[1]) < 0.02
  rows = [jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.zeros((3, 4)), w) for f in (cast, loss)]
  for a, b in zip(*rows, strict=True):
    assert relative_error(a, b) < 0.02
