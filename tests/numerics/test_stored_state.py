"""State in few bytes: what is lost of it, and of the updates of master weights, is what NumPy finds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpjax

ROWS, GROUP, GROUPS = 64, 128, 3
SHAPE = (ROWS, GROUP * GROUPS)
ONES, ZEROS, BATCH = np.ones(SHAPE, np.float32), np.zeros(SHAPE, np.float32), np.ones(4, np.float32)


def signed(seed, shape=SHAPE, binades=10):
  """Numbers over some 2 * `binades` powers of two."""
  rng = np.random.default_rng(seed)
  return (rng.choice([-1, 1], shape) * 2.0 ** rng.normal(-20, binades / 2, shape)).astype(np.float32)


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


def int8_table(has_sign):
  """All values that a code stands for, over its scale: eight to a binade, below 1."""
  steps = np.arange(127 if has_sign else 255)
  above = np.concatenate([[0.0], 2.0 ** -(steps // 8 + (steps % 8 > 0)) * (1 + (-steps % 8) / 8)])
  return np.unique(np.concatenate([-above, above]) if has_sign else above)


def stored_by_hand(x, dtype):
  """What each group is stored as, and its scale."""
  grouped = x.astype(np.float64).reshape(ROWS, GROUPS, GROUP)
  scale = np.abs(grouped).max(-1, keepdims=True)
  y = grouped / scale
  if dtype == "float8_e4m3fn":
    y = np.where((y > 0) & (x.min() >= 0), np.maximum(y, 2.0**-9 / 256), y)
    back = (y * 256).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 256
  else:
    table = int8_table(x.min() < 0)
    back = table[np.abs(y[..., None] - table).argmin(-1)]
    if x.min() >= 0:  # a second moment that is not zero stays so
      back = np.where((y > 0) & (back == 0), table[1], back)
  return (back * scale).reshape(SHAPE)


def inspected(policy, mu, nu):
  step = mpjax.make_train_step(loss_fn, adam_of(mu, nu, ONES), policy)
  return mpjax.inspect_numerics(step, step.init({"w": ONES}), BATCH, advise=False, pieces=1)


SCALED = {"base": "fp16", "loss_scaling": {"kind": "dynamic", "init_scale": 2.0**8}}
KEPT = {
  "int8": {**SCALED, "optimizer_dtype": "int8"},
  "E4M3": {"base": "bf16", "optimizer_dtype": "float8_e4m3fn"},
  "lean": "bf16_lean",
}


@pytest.mark.parametrize("policy", KEPT.values(), ids=KEPT)
def test_errors_of_stored_moments_are_those_of_their_nearest_codes(policy):
  moments = {"mu": signed(0), "nu": np.abs(signed(1, binades=12))}
  report = inspected(policy, **moments)
  dtype = mpjax.get_policy(policy).optimizer_dtype.name
  assert [(s.slot, s.dtype, s.arrays, s.entries) for s in report.stored] == [
    (name, dtype, 1, moments[name].size) for name in moments
  ]
  for slot in report.stored:
    exact = moments[slot.slot]
    back = stored_by_hand(exact, dtype)
    errors = np.abs(back - exact) / np.abs(exact)
    assert slot.median == pytest.approx(np.median(errors), rel=0.02)
    assert slot.largest == pytest.approx(errors.max(), rel=1e-3)
    assert slot.became_zero == pytest.approx((back == 0).mean(), abs=1e-7)
    assert (slot.groups, slot.not_finite) == (ROWS * GROUPS, 0)
  assert report.stored[0].became_zero > 0
  shown = [line.split()[:3] for line in report.table("stored").splitlines()]
  assert [line for line in shown if line[:1] in (["mu"], ["nu"])] == [["mu", dtype, "1"], ["nu", dtype, "1"]]


def test_bfloat16_rounded_stochastically_is_off_by_at_most_a_step_and_has_no_scales():
  report = inspected({"base": "bf16", "optimizer_dtype": "bfloat16"}, signed(0), np.abs(signed(1)))
  for slot in report.stored:
    assert 2.0**-11 < slot.median < slot.largest < 2.0**-7
    assert (slot.became_zero, slot.groups, slot.not_finite) == (0, 0, 0)


def test_scales_that_are_not_finite_are_counted_and_a_problem():
  mu, nu = signed(0), np.abs(signed(1))
  nu[0, 0], nu[5, 200], nu[5, 201] = np.inf, np.nan, np.nan
  report = inspected({"base": "bf16", "optimizer_dtype": "int8"}, mu, nu)
  first, second = report.stored
  assert (first.not_finite, second.not_finite) == (0, pytest.approx(2 / (ROWS * GROUPS)))
  assert (second.entries, second.largest) == (nu.size - 3, np.inf)
  assert [(f.severity, f.module) for f in report.findings if f.kind == "stored state"] == [("problem", "nu")]
  assert report.to_dict()["stored"][1]["largest"] == "inf"


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
  report = mpjax.inspect_numerics(step, state, BATCH, advise=False, pieces=1)
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


def test_nothing_is_said_of_a_state_in_float32():
  report = still("bf16", 1e-3)
  assert report.stored == ()
  assert "stored" not in report.tables
