"""Updates of master weights that are lost in each format are those that NumPy finds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpjax

SHAPE = (64, 384)
ONES, ZEROS, BATCH = np.ones(SHAPE, np.float32), np.zeros(SHAPE, np.float32), np.ones(4, np.float32)


def loss_fn(params, batch):
  return sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params)) * jnp.mean(batch) * 1e-3


def adam_of(mu, nu, updates):
  """A transform whose step makes the given moments and updates, whatever the gradients are."""

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros, zeros)

  def update(grads, state, params=None):
    return {"w": updates}, optax.ScaleByAdamState(state.count + 1, {"w": mu}, {"w": nu})

  return optax.GradientTransformation(init, update)


def rounded(x, bits):
  """Float32 numbers rounded to so many bits, ties away from zero."""
  whole = x.view(np.uint32).astype(np.uint64) + (1 << (31 - bits))
  return (whole & ~np.uint64((1 << (32 - bits)) - 1)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("correction", ["int8", "int16", "stochastic", "none"])
def test_lost_updates_are_those_of_the_master_weights(correction):
  rng = np.random.default_rng(3)
  masters = (rng.choice([-1, 1], SHAPE) * rng.uniform(0.5, 2, SHAPE)).astype(np.float32)
  masters = {"int8": rounded(masters, 24), "int16": masters}.get(correction, rounded(masters, 16))
  updates = (masters * rng.choice([-1, 1], SHAPE) * 2.0 ** rng.uniform(-25, -8, SHAPE)).astype(np.float32)
  updates[:8] = 0
  wide = mpjax.make_train_step(loss_fn, adam_of(ZEROS, ZEROS, updates), "fp32")
  step = wide.with_policy({"base": "bf16_pure", "master_weights": correction})
  state = step.adopt(wide.init({"w": masters}), wide)
  report = mpjax.inspect_numerics(step, state, BATCH, advise=False)
  (t,) = report.of("update")
  moved = updates != 0
  bf16 = masters.astype(ml_dtypes.bfloat16)
  expected = {
    "bfloat16": (bf16.astype(np.float32) + updates).astype(ml_dtypes.bfloat16) == bf16,
    "int8": masters + updates == masters,  # on average
    "int16": masters + updates == masters,
  }
  for name, stays in expected.items():
    assert t.lost[name] == pytest.approx(stays[moved].mean(), abs=1e-6), name
  assert (t.moved, t.held) == (moved.sum(), "bfloat16" if correction == "none" else correction)
  assert report.lost_updates() == {**t.lost, "stochastic": 0}
  assert t.lost["bfloat16"] > 0.8 > 0.3 > t.lost["int16"] > 0
  assert t.lost_here == (t.lost["bfloat16"] if correction == "none" else 0)
  (found,) = [f for f in report.findings if f.kind == "lost updates"]
  assert found.severity == ("problem" if correction == "none" else "note")


def still(policy, size):
  """An inspection of weights of 1 with updates of a size."""
  tx = adam_of(ZEROS, ZEROS, np.full(SHAPE, size, np.float32))
  return mpjax.inspect_numerics(loss_fn, {"w": ONES}, BATCH, policy=policy, tx=tx)


def test_advice_for_lost_updates_names_corrections():
  advice = still("bf16_pure", 2.0**-10).advice
  assert advice.policy["param_dtype"] == "float32"
  text = "master_weights: int16, or int8 (3 bytes a weight instead of 4; loses 0)"
  assert text in dict(advice.lines)["param_dtype: float32"]
  assert still({"base": "bf16_pure", "master_weights": "int8"}, 2.0**-18).advice.unchanged
  assert still("bf16_lean", 2.0**-10).advice.unchanged
