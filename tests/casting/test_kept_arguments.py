"""What the backward pass keeps of parameters under autocast: no copy of one, cast or broadcast."""

import jax
import jax.numpy as jnp
import numpy as np

import mpjax

ROWS, D, LAYERS = 4, 32, 3
X = np.cos(np.arange(ROWS * D, dtype=np.float32)).reshape(ROWS, D)
STACK = np.sin(np.arange(LAYERS * D * D, dtype=np.float32)).reshape(LAYERS, D, D) / 4
SCALES = 1 + np.cos(np.arange(LAYERS * D, dtype=np.float32)).reshape(LAYERS, D) / 4
BF16 = mpjax.autocast(policy="bf16")


def kept(fun, *args, at_least=ROWS * D):
  """Types of what `jax.vjp` keeps for the gradient of the first argument, beside the arguments; the large."""
  vjp = lambda first, *rest: jax.tree.leaves(jax.vjp(lambda p: fun(p, *rest), first)[1])
  body = jax.make_jaxpr(vjp)(*args).jaxpr
  found = {v for v in body.outvars if not hasattr(v, "val")} - {*body.invars, *body.constvars}
  return sorted(str(v.aval) for v in found if v.aval.size >= at_least)


layer = lambda x, w: jnp.maximum(x @ w, 0.0)
scan = lambda step, stack, x: jax.lax.scan(lambda x, w: (step(x, w), None), x, stack)[0].sum()


def unrolled(stack, x):
  for i in range(LAYERS):
    x = layer(x, stack[i])
  return x.sum()


rows = lambda stack, x: scan(layer, stack, x)
constant = lambda stack, x: jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, stack[0].T), x).sum()


def rotated(stack, x):
  """A product whose result is multiplied by one table at every step, as position embeddings are."""
  table = jnp.cos(X)[:1]
  return scan(lambda x, w: (x @ w) * table, stack, x)


def over_devices(fun, **options):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(fun, mesh=mesh, out_specs=jax.P(), **options)


def test_no_half_precision_copy_of_a_weight_or_an_input_is_kept():
  total = lambda stack, x: jax.lax.psum(unrolled(stack, x), "d")
  on_a_mesh = over_devices(total, in_specs=(jax.P(), jax.P("d")))
  for net in (rows, constant, unrolled, lambda stack, x: jax.jit(rows)(stack, x), on_a_mesh):
    assert kept(BF16(net), STACK, X, at_least=D * D) == [], net
  assert kept(mpjax.autocast(rows, "fp16"), STACK, X, at_least=D * D) == []
  # A batch of large rows before the first product: its cast is as large as what a layer leaves.
  assert kept(BF16(lambda w, x: (x / 255 @ w).sum()), STACK[0], X) == []


def test_what_is_made_of_a_parameter_at_a_price_is_kept_in_half_precision():
  """In float32 it would take twice the memory."""

  def gathered(w, x):
    w = jax.lax.all_gather(w, "d", tiled=True)
    return jax.lax.psum(layer(layer(x, w), w).sum(), "d")

  sorted_rows = lambda w, x: layer(layer(x, w), w[jnp.argsort(x[0])]).sum()
  on_mesh = over_devices(gathered, in_specs=(jax.P("d"), jax.P()), check_vma=False)
  for f, shape in ((sorted_rows, f"[{D},{D}]"), (on_mesh, f"[{4 * D},{D}]")):
    found = kept(BF16(f), STACK[0], X)
    assert f"bfloat16{shape}" in found
    assert f"float32{shape}" not in found


def frozen_norm(params, x):
  """A BatchNorm that is no longer trained, as flax computes it."""

  def one(x, row):
    w, scale = row
    return layer((x - 0.5) * (jax.lax.rsqrt(scale + 1.5) * scale)[None] + scale[None], w), None

  return jax.lax.scan(one, x, params)[0].sum()


def test_a_parameter_is_not_kept_as_broadcast():
  half = f"bfloat16[{LAYERS},{ROWS},{D}]"
  found = kept(BF16(frozen_norm), (STACK, SCALES), X)
  assert found.count(half) == 3  # what enters the norm, what enters the product, what enters the maximum
  assert kept(BF16(rotated), STACK, X).count(half) == 1


def test_an_override_keeps_what_it_is_told_to():
  f = jax.named_scope("net")(rows)
  found = kept(mpjax.autocast(f, "bf16", overrides={"net": {"recompute": "nothing"}}), STACK, X)
  assert f"bfloat16[{LAYERS},{D},{D}]" in found
