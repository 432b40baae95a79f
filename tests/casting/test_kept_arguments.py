"""What the backward pass keeps of parameters under autocast: no copy of one, cast or broadcast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import jit

ROWS, D, LAYERS = 4, 32, 3
X = jnp.cos(jnp.arange(ROWS * D, dtype=jnp.float32)).reshape(ROWS, D)
STACK = jnp.sin(jnp.arange(LAYERS * D * D, dtype=jnp.float32)).reshape(LAYERS, D, D) / 4
SCALES = 1 + jnp.cos(jnp.arange(LAYERS * D, dtype=jnp.float32)).reshape(LAYERS, D) / 4


def kept(fun, *args, at_least=ROWS * D):
  """Types of what `jax.vjp` keeps for the gradient of the first argument, beside the arguments; the large."""
  closed = jax.make_jaxpr(lambda first, *rest: jax.tree.leaves(jax.vjp(lambda p: fun(p, *rest), first)[1]))(
    *args
  )
  body = closed.jaxpr
  found = {v for v in body.outvars if not hasattr(v, "val")} - {*body.invars, *body.constvars}
  return sorted(str(v.aval) for v in found if v.aval.size >= at_least)


def layer(x, w):
  return jnp.maximum(x @ w, 0.0)


def rows(stack, x):
  return jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0].sum()


def constant(stack, x):
  return jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, stack[0].T), x).sum()


def unrolled(stack, x):
  for i in range(LAYERS):
    x = layer(x, stack[i])
  return x.sum()


def in_branches(stack, x):
  first = lambda w, x: layer(x, w)
  return jax.lax.cond(
    x[0, 0] > 0, first, lambda w, x: layer(layer(x, w), w), stack.reshape(-1, D)[:D], x
  ).sum()


def in_jit(stack, x):
  return jax.jit(rows)(stack, x)


def on_a_mesh(stack, x):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  total = lambda stack, x: jax.lax.psum(unrolled(stack, x), "d")
  return jax.shard_map(total, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P())(stack, x)


@pytest.mark.parametrize("net", [rows, constant, unrolled, in_jit, on_a_mesh], ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_no_half_precision_copy_of_a_weight_is_kept(net, policy):
  assert kept(mpjax.autocast(net, policy), STACK, X, at_least=D * D) == []


def test_nor_one_of_an_input():
  """A batch of large rows before the first product: its cast is as large as what a layer leaves."""
  assert kept(mpjax.autocast(lambda w, x: (x / 255 @ w).sum(), "bf16"), STACK[0], X) == []


def test_what_is_made_of_a_parameter_at_a_price_is_kept_in_half_precision():
  """In float32 it would take twice the memory."""
  found = kept(
    mpjax.autocast(lambda w, x: layer(layer(x, w), w[jnp.argsort(x[0])]).sum(), "bf16"), STACK[0], X
  )
  assert f"bfloat16[{D},{D}]" in found
  assert f"float32[{D},{D}]" not in found


def test_so_is_a_gathered_parameter():
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

  def gathered(w, x):
    w = jax.lax.all_gather(w, "d", tiled=True)
    return jax.lax.psum(layer(layer(x, w), w).sum(), "d")

  f = jax.shard_map(gathered, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P(), check_vma=False)
  found = kept(mpjax.autocast(f, "bf16"), STACK[0], X)
  assert f"bfloat16[{4 * D},{D}]" in found
  assert f"float32[{4 * D},{D}]" not in found


def frozen_norm(params, x):
  """A BatchNorm that is no longer trained, as flax computes it."""

  def one(x, row):
    w, scale = row
    return layer((x - 0.5) * (jax.lax.rsqrt(scale + 1.5) * scale)[None] + scale[None], w), None

  return jax.lax.scan(one, x, params)[0].sum()


def rotated(stack, x):
  """A product whose result is multiplied by one table at every step, as position embeddings are."""
  table = jnp.cos(X)[:1]
  return jax.lax.scan(lambda x, w: ((x @ w) * table, None), x, stack)[0].sum()


def test_a_parameter_is_not_kept_as_broadcast():
  half = f"bfloat16[{LAYERS},{ROWS},{D}]"
  found = kept(mpjax.autocast(frozen_norm, "bf16"), (STACK, SCALES), X)
  assert found.count(half) == 3  # what enters the norm, what enters the product, what enters the maximum
  assert kept(mpjax.autocast(rotated, "bf16"), STACK, X).count(half) == 1


@pytest.mark.parametrize("net", [rows, constant, unrolled, in_branches, rotated], ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_keeping_all(net):
  again, keeping = (
    jax.value_and_grad(mpjax.autocast(net, "bf16", recompute=how)) for how in ("islands", "nothing")
  )
  (value, grads), (value_too, grads_too) = jit(lambda *args: (again(*args), keeping(*args)))(STACK, X)
  assert value == value_too
  np.testing.assert_allclose(grads, grads_too, rtol=0, atol=2**-8 * np.abs(np.asarray(grads_too)).max())


def test_the_gradient_of_a_weight_with_many_uses_is_summed_in_float32():
  """In bfloat16 256 + 1 is 256."""
  w, x = jnp.ones((2, 2)), jnp.ones((1, 2))
  f = mpjax.autocast(lambda w, x: sum((x @ w).sum() for _ in range(300)), "bf16")
  np.testing.assert_array_equal(jit(jax.grad(f))(w, x), np.full((2, 2), 300.0))


def test_an_override_keeps_what_it_is_told_to():
  f = jax.named_scope("net")(rows)
  found = kept(mpjax.autocast(f, "bf16", overrides={"net": {"recompute": "nothing"}}), STACK, X)
  assert f"bfloat16[{LAYERS},{D},{D}]" in found
