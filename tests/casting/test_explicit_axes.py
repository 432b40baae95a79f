"""Autocast inside `jax.set_mesh` of explicit axes, where the type of an array says how it is divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._jaxprs import jit, multiplied, named

ROWS, TOKENS, WIDTH, HIDDEN, ENTRIES = 8, 4, 16, 32, 24


def explicit_mesh():
  return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def on_mesh():
  return not jax.sharding.get_abstract_mesh().empty


def at(*spec):
  """Returns what the argument `out_sharding` takes: a spec, and nothing where there is no mesh."""
  return P(*spec) if on_mesh() else None


def put(x, *spec):
  return jax.device_put(x, P(*spec)) if on_mesh() else jnp.asarray(x)


def inputs():
  normal = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  params = {
    "up": put(normal(0, WIDTH, HIDDEN) / 4, None, "model"),
    "down": put(normal(1, HIDDEN, WIDTH) / 6, "model", None),
    "scale": put(np.ones(WIDTH, np.float32)),
    "table": put(normal(2, ENTRIES, WIDTH) / 4, "model", None),
  }
  labels = np.random.default_rng(3).integers(0, ENTRIES, (ROWS, TOKENS))
  return params, {"x": put(normal(4, ROWS, TOKENS, WIDTH), "data"), "y": put(labels, "data")}


def block(p, x):
  hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x, p["up"], out_sharding=at("data", None, "model")))
  x += jnp.einsum("btf,fd->btd", hidden, p["down"], out_sharding=at("data"))
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def attention(x):
  scores = jnp.einsum("btd,bsd->bts", x, x) / 4
  mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
  return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), x)


def logits(p, x):
  return jnp.einsum("btd,vd->btv", x, p["table"], out_sharding=at("data", None, "model"))


def loss_of(p, x, y):
  return -jnp.sum(jax.nn.one_hot(y, ENTRIES) * jax.nn.log_softmax(logits(p, x)), -1).mean()


def in_a_scan(p, x):
  layers = jax.tree.map(lambda w: jnp.stack([w, 0.9 * w]), {k: p[k] for k in ("up", "down", "scale")})
  return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0]


def in_a_shard_map(p, x):
  if not on_mesh():
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

  def mine(x, up, down):
    return x + jax.lax.psum(jax.nn.gelu(x @ up) @ down, "model")

  return jax.shard_map(mine, in_specs=(P("data"), P(None, "model"), P("model", None)), out_specs=P("data"))(
    x, p["up"], p["down"]
  )


def in_auto_axes(p, x):
  inside = lambda x, up, down: jax.nn.softmax(x @ up) @ down
  run = jax.sharding.auto_axes(inside, out_sharding=P("data")) if on_mesh() else inside
  return run(x, p["up"], p["down"])


def in_a_vmap(p, x):
  def of_row(x):
    hidden = jax.nn.gelu(x @ p["up"])
    return jnp.dot(hidden, p["down"], out_sharding=at(None, None))

  return jax.vmap(of_row)(x)


@jax.custom_vjp
def product(x, w):
  return jnp.dot(x, w, out_sharding=at("data", None, "model"))


def product_transposed(residuals, ct):
  x, w = residuals
  of_x = jnp.einsum("btf,df->btd", ct, w, out_sharding=at("data"))
  return of_x, jnp.einsum("btd,btf->df", x, ct, out_sharding=at(None, "model"))


product.defvjp(lambda x, w: (product(x, w), (x, w)), product_transposed)

PROGRAMS = {
  "layers": lambda p, x: attention(block(p, x)),
  "jit": lambda p, x: jax.jit(block)(p, x),
  "scan": in_a_scan,
  "checkpoint": lambda p, x: jax.checkpoint(block)(p, x),
  "cond": lambda p, x: jax.lax.cond(x.sum() > -1e6, block, lambda p, x: x, p, x),
  "shard_map": in_a_shard_map,
  "auto_axes": in_auto_axes,
  "vmap": in_a_vmap,
  "custom_vjp": lambda p, x: jnp.dot(product(x, p["up"]), p["down"], out_sharding=at("data")),
  "embedding": lambda p, x: block(p, p["table"].at[jnp.argsort(x[..., 0])].get(out_sharding=at("data"))),
}


def loss(name):
  return lambda p, batch: loss_of(p, PROGRAMS[name](p, batch["x"]), batch["y"])


def both_orders(fun, policy="bf16"):
  """Returns `value_and_grad` of a function under autocast, and autocast of its `value_and_grad`."""
  return {
    "of autocast": jax.value_and_grad(mpjax.autocast(fun, policy)),
    "under autocast": mpjax.autocast(jax.value_and_grad(fun), policy),
  }


def types(fun, *args):
  """Returns shapes, dtypes and shardings of what a function returns."""
  return jax.tree.map(jax.typeof, jax.eval_shape(fun, *args))


@pytest.mark.parametrize(
  ("name", "policy"),
  [
    *((name, "bf16") for name in PROGRAMS),
    ("layers", "fp16"),
    ("layers", {"base": "fp8", "fp8": {"emulate": True}}),
  ],
  ids=str,
)
def test_types_of_results_are_those_without_autocast(name, policy):
  fun = loss(name)
  with jax.set_mesh(explicit_mesh()):
    args = inputs()
    expected = types(jax.value_and_grad(fun), *args)
    for order, run in both_orders(fun, policy).items():
      assert types(run, *args) == expected, order
    dots = mpjax.autocast(fun, policy, recompute="dots")
    assert types(jax.value_and_grad(dots), *args) == expected


@functools.cache
def values(explicit):
  """Computes loss and gradients of all programs, in one: on the mesh under autocast, and plain on one device."""

  def everything(*args):
    ways = {
      name: both_orders(loss(name)) if explicit else {"": jax.value_and_grad(loss(name))} for name in PROGRAMS
    }
    return {name: {how: run(*args) for how, run in of_one.items()} for name, of_one in ways.items()}

  return jax.tree.map(np.asarray, jit(everything)(*inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_float32_on_one_device(name):
  plain = values(explicit=False)[name][""]
  with jax.set_mesh(explicit_mesh()):
    ours = values(explicit=True)[name]
  for order, found in ours.items():
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=3e-2 * np.abs(other).max(), err_msg=order)


def test_auxiliary_results_keep_their_types():
  def fun(p, batch):
    out = logits(p, attention(block(p, batch["x"])))
    right = (jnp.argmax(out, -1) == batch["y"]).sum()
    return out.mean(), {"logits": out, "right": right, "hidden": out.sum(-1)}

  with jax.set_mesh(explicit_mesh()):
    args = inputs()
    expected = types(jax.value_and_grad(fun, has_aux=True), *args)
    assert expected[0][1]["logits"].sharding.spec == P("data", None, "model")
    assert types(jax.value_and_grad(mpjax.autocast(fun, "bf16"), has_aux=True), *args) == expected
    assert types(mpjax.autocast(jax.value_and_grad(fun, has_aux=True), "bf16"), *args) == expected


def test_out_sharding_of_products_is_kept():
  with jax.set_mesh(explicit_mesh()):
    args = inputs()
    plain, ours = (
      named("dot_general", fun, *args) for fun in (loss("layers"), mpjax.autocast(loss("layers"), "bf16"))
    )
  shardings = lambda found: [(e.outvars[0].aval.sharding, e.params["out_sharding"]) for e in found]
  assert shardings(ours) == shardings(plain)
  assert set(map(multiplied, ours)) == {"bf16 bf16"}


class OfNnx(nnx.Module):
  def __init__(self, rngs):
    divided = lambda *spec: {"kernel_metadata": {"out_sharding": spec}} if on_mesh() else {}
    self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs, **divided(None, "model"))
    self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
    self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs, **divided("model", None))

  def __call__(self, x):
    x = nnx.gelu(self.norm(self.up(x, out_sharding=at("data", None, "model"))))
    return self.down(x, out_sharding=at("data"))


class OfLinen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.gelu(nn.LayerNorm()(nn.Dense(HIDDEN)(x)))
    return nn.Dense(WIDTH)(x)


def nnx_loss(module, x):
  return (module(x) ** 2).mean()


def of_nnx(policy):
  graphdef, state = nnx.split(OfNnx(nnx.Rngs(0)))
  run = nnx_loss if policy is None else mpjax.autocast(nnx_loss, policy)
  return lambda state, x: run(nnx.merge(graphdef, state), x), state


def of_linen(policy):
  params = jax.tree.map(put, OfLinen().init(jax.random.key(0), jnp.ones((1, TOKENS, WIDTH))))
  fun = lambda params, x: (OfLinen().apply(params, x) ** 2).mean()
  return fun if policy is None else mpjax.autocast(fun, policy), params


@pytest.mark.parametrize("make", [of_nnx, of_linen])
def test_models_of_flax(make):
  x = inputs()[1]["x"]
  fun, state = make("bf16")
  one = jax.jit(jax.value_and_grad(fun))(state, x)
  with jax.set_mesh(explicit_mesh()):
    x = inputs()[1]["x"]
    fun, state = make("bf16")
    run = jax.value_and_grad(fun)
    assert types(run, state, x) == types(jax.value_and_grad(make(None)[0]), state, x)
    many = jax.jit(run)(state, x)
  for ours, theirs in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-2 * np.abs(theirs).max())


@pytest.mark.parametrize("whole", [False, True], ids=["moments divided", "moments whole"])
def test_a_step_with_loss_scaling_keeps_types_and_skips_what_overflows(whole):
  tx = mpjax.with_loss_scaling(optax.adam(1e-2), mpjax.get_policy("fp16").loss_scaling)
  fun = mpjax.autocast(loss("layers"), "fp16")

  def step(p, state, batch):
    grads = jax.grad(lambda p: mpjax.scale_loss(fun(p, batch), state))(p)
    updates, state = tx.update(grads, state, p)
    return optax.apply_updates(p, updates), state

  def run():
    p, batch = inputs()
    state = tx.init(p)
    if whole and on_mesh():
      state = jax.device_put(state, P())
    take = jax.jit(step)
    stepped = take(p, state, batch)
    skipped = take(*stepped, {**batch, "x": batch["x"] * jnp.inf})
    assert jax.tree.map(jax.typeof, skipped) == jax.tree.map(jax.typeof, (p, state))
    jax.tree.map(np.testing.assert_array_equal, skipped[0], stepped[0])
    scales = [mpjax.get_loss_scale(s).scale.item() for s in (stepped[1], skipped[1])]
    assert scales[1] == scales[0] / 2
    return stepped[0]

  with jax.set_mesh(explicit_mesh()):
    many = jax.tree.map(np.asarray, run())
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-2), many, run())
