"""State and weights in few bytes round and inside other transforms, and in others' training states."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import mpjax
from mpjax.optim import Quantized, is_quantized
from tests.optim._forms import FORMS, described, normal, same_bits

TARGET = {"w": normal(64, 80), "b": np.linspace(-1, 1, 7, dtype=np.float32)}
NOISE = {"w": 0.3 * normal(60, 64, 80, seed=1), "b": 0.3 * normal(60, 7, seed=2)}
ADAMW = optax.adamw(optax.cosine_decay_schedule(0.1, 100))


def loss(params):
  squares = jax.tree.map(lambda p, t: jnp.sum((p.astype(jnp.float32) - t) ** 2), params, TARGET)
  return sum(jax.tree.leaves(squares))


def start(dtype):
  return jax.tree.map(lambda t: np.zeros(t.shape, dtype), TARGET)


@functools.cache
def trained(form):
  """Returns parameters, state and loss after 60 steps with noisy gradients in one scan."""
  wrap, dtype = FORMS[form] if form else (lambda tx: tx, jnp.float32)
  tx = wrap(ADAMW)

  def step(carry, noise):
    params, state = carry
    grads = jax.tree.map(lambda g, n: g.astype(jnp.float32) + n, jax.grad(loss)(params), noise)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  @jax.jit
  def run(params, noise):
    params, state = jax.lax.scan(step, (params, tx.init(params)), noise)[0]
    return params, state, loss(params)

  return run(start(dtype), NOISE)


@pytest.mark.parametrize("form", FORMS)
def test_a_scan_of_steps_trains_as_in_float32(form):
  wrap, dtype = FORMS[form]
  params, state, found = trained(form)
  assert described(state) == described(jax.eval_shape(wrap(ADAMW).init, params))
  assert all(p.dtype == dtype for p in jax.tree.leaves(params))
  assert state.steps == getattr(state.inner_state, "steps", 60) == 60
  begin = sum(np.sum(t**2) for t in TARGET.values())
  assert abs(found - trained(None)[2]) < 0.01 * begin
  if "weights" not in form:
    stored = [x for x in jax.tree.leaves(state, is_leaf=is_quantized) if isinstance(x, Quantized)]
    assert stored
    assert all(x.codes.shape == (64, 80) for x in stored)


@pytest.mark.parametrize("form", ["weights int8", "lean"])
def test_a_skip_of_a_guard_inside_changes_no_weight_and_no_code(form):
  wrap, dtype = FORMS[form]
  tx = wrap(mpjax.static_loss_scale(optax.adamw(0.1), 1.0))
  good = jax.tree.map(lambda t: t.astype(dtype), TARGET)
  bad = {**good, "b": good["b"] * dtype(np.nan)}
  update, params, state = jax.jit(tx.update), start(dtype), tx.init(start(dtype))
  for _ in range(2):
    updates, state = update(good, state, params)
    params = optax.apply_updates(params, updates)
  updates, after = update(bad, state, params)
  same_bits((optax.apply_updates(params, updates), after.correction), (params, state.correction))
  same_bits(mpjax.get_loss_scale(after).inner_state, mpjax.get_loss_scale(state).inner_state)
  assert not mpjax.get_loss_scale(after).grads_finite


@pytest.mark.parametrize("form", ["float8_e4m3fn", "lean"])
def test_in_a_train_state_that_flax_serializes(form):
  wrap, dtype = FORMS[form]
  make = lambda: TrainState.create(apply_fn=None, params=start(dtype), tx=wrap(optax.adamw(0.1)))
  step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss)(state.params)))
  state = step(step(make()))
  restored = flax.serialization.from_bytes(make(), flax.serialization.to_bytes(state))
  same_bits((restored.params, restored.opt_state), (state.params, state.opt_state))
  same_bits(step(restored).opt_state, step(state).opt_state)
