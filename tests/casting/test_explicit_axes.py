"""Autocast inside `jax.set_mesh` of explicit axes, where the type of an array says how it is divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpjax
from tests.casting._jaxprs import jit

ROWS, TOKENS, WIDTH, HIDDEN, ENTRIES = 8, 4, 16, 32, 24


@pytest.fixture(autouse=True)
def _mesh():
  with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
    yield


def put(seed, shape, *spec, scale=1.0):
  values = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale
  return jax.device_put(np.float32(values), P(*spec))


def inputs():
  params = {
    "up": put(0, (WIDTH, HIDDEN), None, "model", scale=1 / 4),
    "down": put(1, (HIDDEN, WIDTH), "model", None, scale=1 / 6),
    "scale": put(2, (WIDTH,)),
    "table": put(3, (ENTRIES, WIDTH), "model", None, scale=1 / 4),
  }
  labels = np.random.default_rng(3).integers(0, ENTRIES, (ROWS, TOKENS))
  return params, {"x": put(4, (ROWS, TOKENS, WIDTH), "data"), "y": jax.device_put(labels, P("data"))}


def block(p, x):
  hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x, p["up"], out_sharding=P("data", None, "model")))
  x += jnp.einsum("btf,fd->btd", hidden, p["down"], out_sharding=P("data"))
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def attention(x):
  scores = jnp.einsum("btd,bsd->bts", x, x) / 4
  mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
  return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), x)


def logits(p, x):
  return jnp.einsum("btd,vd->btv", x, p["table"], out_sharding=P("data", None, "model"))


def in_a_scan(p, x):
  layers = {k: jnp.stack([p[k], 0.9 * p[k]]) for k in ("up", "down", "scale")}
  return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0]


def in_a_shard_map(p, x):
  inside = lambda x, up, down: x + jax.lax.psum(jax.nn.gelu(x @ up) @ down, "model")
  in_specs = (P("data"), P(None, "model"), P("model", None))
  return jax.shard_map(inside, in_specs=in_specs, out_specs=P("data"))(x, p["up"], p["down"])


def in_auto_axes(p, x):
  inside = lambda x, up, down: jax.nn.softmax(x @ up) @ down
  return jax.sharding.auto_axes(inside, out_sharding=P("data"))(x, p["up"], p["down"])


def product_transposed(residuals, ct):
  x, w = residuals
  of_x = jnp.einsum("btf,df->btd", ct, w, out_sharding=P("data"))
  return of_x, jnp.einsum("btd,btf->df", x, ct, out_sharding=P(None, "model"))


product = jax.custom_vjp(lambda x, w: jnp.dot(x, w, out_sharding=P("data", None, "model")))
product.defvjp(lambda x, w: (product(x, w), (x, w)), product_transposed)
PROGRAMS = {
  "layers": lambda p, x: attention(block(p, x)),
  "jit": lambda p, x: jax.jit(block)(p, x),
  "scan": in_a_scan,
  "checkpoint": lambda p, x: jax.checkpoint(block)(p, x),
  "cond": lambda p, x: jax.lax.cond(x.sum() > -1e6, block, lambda p, x: x, p, x),
  "shard_map": in_a_shard_map,
  "auto_axes": in_auto_axes,
  "vmap": lambda p, x: jax.vmap(lambda x: jnp.dot(x @ p["up"], p["down"], out_sharding=P(None, None)))(x),
  "custom_vjp": lambda p, x: jnp.dot(product(x, p["up"]), p["down"], out_sharding=P("data")),
  "embedding": lambda p, x: block(p, p["table"].at[jnp.argsort(x[..., 0])].get(out_sharding=P("data"))),
}


QUICK = {"shard_map", "custom_vjp", "embedding"}


def loss(name):
  def fun(p, batch):
    scores = jax.nn.log_softmax(logits(p, PROGRAMS[name](p, batch["x"])))
    return -jnp.sum(jax.nn.one_hot(batch["y"], ENTRIES) * scores, -1).mean()

  return fun


def both_orders(fun, policy="bf16", **options):
  """Returns `value_and_grad` of a function under autocast, and autocast of its `value_and_grad`."""
  return {
    "of autocast": jax.value_and_grad(mpjax.autocast(fun, policy), **options),
    "under autocast": mpjax.autocast(jax.value_and_grad(fun, **options), policy),
  }


def types(fun, *args):
  """Returns shapes, dtypes and shardings of what a function returns."""
  return jax.tree.map(jax.typeof, jax.eval_shape(fun, *args))


def test_types_of_results_are_those_without_autocast():
  fp8, args = {"base": "fp8", "fp8": {"emulate": True}}, inputs()
  for name, policy in (*((name, "bf16") for name in PROGRAMS), ("layers", "fp16"), ("layers", fp8)):
    fun = loss(name)
    expected = types(jax.value_and_grad(fun), *args)
    ways = both_orders(fun, policy)
    for way, run in ways.items():
      assert types(run, *args) == expected, (name, policy, way)


@pytest.mark.parametrize(
  "names",
  [
    pytest.param(QUICK, id="quick"),
    pytest.param(PROGRAMS.keys() - QUICK, marks=pytest.mark.slow, id="others"),
  ],
)
def test_values_are_those_of_float32(names):
  ways = {name: {**both_orders(loss(name)), "plain": jax.value_and_grad(loss(name))} for name in names}
  run = lambda *args: {name: {way: f(*args) for way, f in found.items()} for name, found in ways.items()}
  for name, found in jit(run)(*inputs()).items():
    for way, values in found.items():
      for one, other in zip(jax.tree.leaves(values), jax.tree.leaves(found["plain"]), strict=True):
        atol = 3e-2 * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=f"{name}, {way}")
