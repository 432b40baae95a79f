"""`value_and_grad` and `keep_if_finite`: one loop of one's own for every policy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.models._nnx import Normed

RNG = np.random.default_rng(0)
PARAMS = {name: np.float32(RNG.normal(size=(8, 8)) / 4) for name in ("w", "v")}
X = np.float32(RNG.normal(size=(8, 8)))
BAD_X = X.copy()
BAD_X[0, 0] = np.inf
SCALED = functools.partial(mpjax.dynamic_loss_scale, init_scale=2.0**10)
SGD = optax.sgd(0.1)


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def exact(params, x):
  """The loss and its gradients, in float64 by hand."""
  w, v, x = (np.float64(a) for a in (params["w"], params["v"], x))
  hidden = np.tanh(x @ w)
  out = hidden @ v - 1
  g = 2 * out / out.size
  return np.mean(out**2), {"w": x.T @ (g @ v.T * (1 - hidden**2)), "v": hidden.T @ g}


def close(tree, expected, rtol=1e-5, atol=1e-6):
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), tree, expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_argnums_aux_and_keyword_arguments_are_those_of_jax(scaled):
  def fun(x, w, *, v, count):
    return jnp.mean((x @ w @ v) ** 2), {"count": count + 1, "name": "aux", "none": None}

  state = (SCALED(SGD) if scaled else SGD).init(PARAMS)
  scale = 2.0**10 if scaled else 1.0
  every = (0, 1, (1,), (0, 1), -1)

  @jax.jit
  def both(x, w, v):
    out = []
    for argnums in every:
      (loss, aux), grads = mpjax.value_and_grad(fun, state, argnums, has_aux=True)(x, w, v=v, count=2)
      (expected, _), plain = jax.value_and_grad(fun, argnums, has_aux=True)(x, w, v=v, count=2)
      assert aux == {"count": 3, "name": "aux", "none": None}
      out.append(((loss, grads), (expected, jax.tree.map(lambda g: g * scale, plain))))
    return out

  for ours, theirs in both(X, PARAMS["w"], PARAMS["v"]):
    close(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_one_loop_with_every_function_serves_every_policy(policy):
  policy = mpjax.get_policy(policy)
  tx = mpjax.with_loss_scaling(SGD, policy)
  run = mpjax.autocast(loss_fn, policy)

  @jax.jit
  def step(params, state, x):
    loss, grads = mpjax.value_and_grad(run, state)(params, x)
    norm = mpjax.loss_scale.gradient_norm(grads, state)
    updates, state = tx.update(grads, state, params)
    metrics = mpjax.loss_scale.loss_scale_metrics(state)
    kept = mpjax.keep_if_finite(state, {"count": jnp.ones(())}, {"count": jnp.zeros(())})
    return optax.apply_updates(params, updates), state, loss, norm, metrics, kept

  params, state, reference = PARAMS, tx.init(PARAMS), PARAMS
  for _ in range(20):
    params, state, loss, norm, metrics, kept = step(params, state, X)
    expected, grads = exact(reference, X)
    reference = {name: reference[name] - 0.1 * g for name, g in grads.items()}
  exactly = policy.label == "fp32"
  np.testing.assert_allclose(loss, expected, rtol=1e-5 if exactly else 0.02)
  squares = sum(np.sum(g**2) for g in grads.values())
  np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-4 if exactly else 0.05)
  assert loss < 0.9 * exact(PARAMS, X)[0]
  assert bool(metrics) == (policy.loss_scaling is not None)
  assert kept["count"] == 1


def test_an_nnx_module_and_its_optimizer():
  model, twin = Normed(8, 8), Normed(8, 8)
  optimizer = nnx.Optimizer(model, mpjax.dynamic_loss_scale(SGD), wrt=nnx.Param)
  of = lambda model, x: jnp.mean((model(x) - 1) ** 2)
  before = np.asarray(model.linear.kernel[...])
  expected, plain = nnx.jit(nnx.value_and_grad(of))(twin, X)

  @nnx.jit
  def step(model, optimizer, x):
    old = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    loss, grads = mpjax.value_and_grad(of, optimizer)(model, x)
    optimizer.update(model, grads)
    nnx.update(model, mpjax.keep_if_finite(optimizer, nnx.state(model, nnx.BatchStat), old))
    return loss

  close(step(model, optimizer, X), expected)
  close(np.asarray(model.linear.kernel[...]), before - 0.1 * np.asarray(plain["linear"]["kernel"][...]))
  close(model.norm.mean[...], twin.norm.mean[...])
  kept = np.asarray(model.linear.kernel[...])
  step(model, optimizer, BAD_X)
  np.testing.assert_array_equal(model.linear.kernel[...], kept)
  assert np.isfinite(model.norm.mean[...]).all()
  assert mpjax.get_loss_scale(optimizer).scale == 2.0**15
  with pytest.raises(ValueError, match=r"same Variables.*nnx\.as_pure"):
    mpjax.keep_if_finite(optimizer, *[nnx.state(model, nnx.BatchStat)] * 2)


def test_what_is_kept_has_the_dtypes_of_the_old():
  tree = lambda half, seed, count, single: {
    "half": half,
    "key": jax.random.key(seed),
    "count": count,
    "none": None,
    "np": single,
    "fun": jnp.tanh,
  }
  new = tree(np.ones(2, jnp.bfloat16), 1, 2, np.ones(2))
  old = tree(np.zeros(2, np.float32), 0, 1, np.zeros(2, np.float32))
  state = SCALED(SGD).init(PARAMS)
  rows = [(SGD.init(PARAMS), 1), (state, 1), (state._replace(grads_finite=np.asarray(False)), 0)]
  rows.append((state._replace(updates_finite=np.asarray(False)), 0))
  for state, value in rows:
    kept = mpjax.keep_if_finite(state, new, old)
    assert (kept["half"].dtype, kept["none"], kept["fun"]) == (np.float32, None, jnp.tanh)
    assert (np.asarray(kept["half"]) == value).all()
    assert (np.asarray(kept["np"]) == value).all()
    assert (int(kept["count"]), jax.random.key_data(kept["key"])[1]) == (1 + value, value)


def of_state(fun, **options):
  return lambda: mpjax.value_and_grad(fun, SCALED(SGD).init(PARAMS), **options)(PARAMS)


# What the error says, and what is done.
MISTAKES = {
  r"fun is a LossScaleState: call mpjax\.value_and_grad\(loss_fn, opt_state\)": (
    lambda: mpjax.value_and_grad(SCALED(SGD).init(PARAMS), loss_fn)
  ),
  "loss that is tuple.*has_aux=True": of_state(lambda p: (p["w"].sum(), 1)),
  r"expected \(loss, aux\)": of_state(lambda p: p["w"].sum(), has_aux=True),
  "loss that is int32": of_state(lambda p: np.int32(1)),
  "scalar": of_state(lambda p: p["w"][0]),
  r"ValueError: .*differ in structure \(at b\)": (
    lambda: mpjax.keep_if_finite(SCALED(SGD).init(PARAMS), {"a": X, "b": X}, {"a": X})
  ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
  with pytest.raises((TypeError, ValueError)) as error:
    jax.eval_shape(lambda: (MISTAKES[message](), ())[1])
  assert re.search(message, f"{error.typename}: {error.value}")
  assert len(str(error.value)) < 300
