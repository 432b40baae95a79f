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
PARAMS = {"w": np.full((4, 6), 0.1, np.float32), "v": np.full((6, 2), 0.1, np.float32)}
PLAIN = optax.sgd(1.0)
X = np.float32(np.random.default_rng(0).normal(size=(16, 4)))


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def by_hand(params, x):
  low = mpjax.cast_floating(params, jnp.bfloat16)
  return jnp.mean(((jnp.tanh(x.astype(jnp.bfloat16) @ low["w"]) @ low["v"]).astype(jnp.float32) - 1) ** 2)


def exact(x):
  """The gradient of `w` in float64 by hand."""
  hidden = np.tanh(np.float64(x) @ PARAMS["w"])
  g = 2 * (hidden @ PARAMS["v"] - 1) / (2 * len(x))
  return np.float64(x).T @ (g @ PARAMS["v"].T * (1 - hidden**2))


def gradients(loss_fn, form, check_vma, tx=PLAIN):
  """The step's gradients in one of the forms of the page, which are scaled if there is a scale in `tx`."""
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

  return functools.partial(run, PARAMS, tx.init(PARAMS))


RIGHT = [("pmean of the loss", True), ("pcast", True), ("pmean of gradients", False)]
AUTOCAST = mpjax.autocast(loss_fn, "bf16")


@pytest.mark.parametrize(("form", "check_vma"), RIGHT)
def test_the_forms_give_the_mean_over_all_rows_and_cross_in_a_dtype(form, check_vma):
  for tx, scale in ((PLAIN, 1), (mpjax.static_loss_scale(PLAIN, 8.0), 8)):
    found = jax.jit(gradients(AUTOCAST, form, check_vma, tx))(X)["w"]
    np.testing.assert_allclose(np.asarray(found) / scale, exact(X), rtol=0.05, atol=5e-4)
  for name, of in {"autocast": AUTOCAST, "by hand": by_hand}.items():
    text = str(jax.make_jaxpr(gradients(of, form, check_vma))(X))
    # What is summed over devices, but for scalars.
    found = set(re.findall(r"(\w+)\[\d[\d,]*\](?:\{[^}]*\})? = psum", text))
    assert found == {"bf16" if (name, form) == ("by hand", "pmean of the loss") else "f32"}, name


def test_what_the_page_warns_of():
  # With check_vma a pmean of the gradients comes too late: JAX has summed them.
  late = jax.jit(gradients(loss_fn, "pmean of gradients", check_vma=True))(X)["w"]
  np.testing.assert_allclose(late, 8 * exact(X), rtol=1e-5, atol=1e-7)
  # Without it a pmean of the loss leaves each device its own gradient; what comes out is the first one's.
  alone = jax.jit(gradients(loss_fn, "pmean of the loss", check_vma=False))(X)["w"]
  np.testing.assert_allclose(alone, exact(X[:2]), rtol=1e-5, atol=1e-7)
