"""What docs/shard_map.md says of gradients over devices: sum or mean, and in which dtype they cross."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

P = jax.sharding.PartitionSpec
PARAMS = {"w": jnp.full((4, 6), 0.1), "v": jnp.full((6, 2), 0.1)}
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def by_hand(params, x):
  low = mpjax.cast_floating(params, jnp.bfloat16)
  return jnp.mean(((jnp.tanh(x.astype(jnp.bfloat16) @ low["w"]) @ low["v"]).astype(jnp.float32) - 1) ** 2)


LOSSES = {"autocast": mpjax.autocast(loss_fn, "bf16"), "by hand": by_hand}


def gradients(loss_fn, form, check_vma, state=None):
  """The step's gradients in one of the forms of the page; unscaled, as there is no scale without `state`."""
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  mean_loss = lambda params, x: jax.lax.pmean(loss_fn(params, x), "d")

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P(), check_vma=check_vma
  )
  def run(params, state, x):
    if form == "pcast":
      params = jax.tree.map(lambda p: jax.lax.pcast(p, "d", to="varying"), params)
    of = mean_loss if "of the loss" in form else loss_fn
    _, grads = mpjax.value_and_grad(of, state)(params, x)
    return grads if form == "pmean of the loss" else jax.lax.pmean(grads, "d")

  return functools.partial(run, PARAMS, optax.sgd(1.0).init(PARAMS) if state is None else state)


def crossing(fun, *args):
  """Dtypes of what is summed over devices, but for scalars."""
  return set(re.findall(r"(\w+)\[\d[\d,]*\](?:\{[^}]*\})? = psum", str(jax.make_jaxpr(fun)(*args))))


RIGHT = [("pmean of the loss", True), ("pcast", True), ("pmean of gradients", False)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("form", "check_vma"), RIGHT)
@pytest.mark.parametrize("name", LOSSES)
def test_the_forms_give_the_mean_over_all_rows(name, form, check_vma, scaled):
  tx = mpjax.static_loss_scale(optax.sgd(1.0), 8.0) if scaled else optax.sgd(1.0)
  run = gradients(LOSSES[name], form, check_vma, tx.init(PARAMS))
  expected = jax.grad(loss_fn)(PARAMS, X)
  found = jax.tree.map(lambda g: g / (8.0 if scaled else 1.0), jax.jit(run)(X))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=5e-4), found, expected)


@pytest.mark.parametrize(
  ("name", "form", "check_vma", "dtype"),
  [(name, form, vma, "f32") for name in LOSSES for form, vma in RIGHT[1:]]
  + [("autocast", "pmean of the loss", True, "f32"), ("by hand", "pmean of the loss", True, "bf16")],
)
def test_the_dtype_that_gradients_cross_in(name, form, check_vma, dtype):
  assert crossing(gradients(LOSSES[name], form, check_vma), X) == {dtype}


def test_what_the_page_warns_of():
  expected = jax.grad(loss_fn)(PARAMS, X)["w"]
  # With check_vma a pmean of the gradients comes too late: JAX has summed them.
  late = gradients(loss_fn, "pmean of gradients", check_vma=True)(X)["w"]
  np.testing.assert_allclose(late, 8 * expected, rtol=1e-5, atol=1e-7)
  # Without it a pmean of the loss leaves each device its own gradient; what comes out is the first one's.
  alone = gradients(loss_fn, "pmean of the loss", check_vma=False)(X)["w"]
  np.testing.assert_allclose(alone, jax.grad(loss_fn)(PARAMS, X[:2])["w"], rtol=1e-5, atol=1e-7)
