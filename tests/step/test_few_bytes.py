"""A step whose policy keeps weights and state in few bytes, and states that go from policy to policy."""

import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.optim import in_full_bytes
from tests.optim._forms import described
from tests.step._problems import (
  WIDE_BATCH as BATCH,
  WIDE_PARAMS as PARAMS,
  assert_same,
  train,
  wide_loss as loss_fn,
)

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 100)


def policy_of(master, state):
  base = {"base": "bf16", "optimizer_dtype": state}
  return base if master is None else base | {"param_dtype": "bfloat16", "master_weights": master}


def make(policy, tx=None, loss=loss_fn, **options):
  return mpjax.make_train_step(loss, tx or optax.adamw(SCHEDULE), policy, donate=False, **options)


def adopt(new, state, old):
  return jax.jit(lambda state: new.adopt(state, old, warn=False))(state)


@functools.cache
def loss_in_float32():
  step = make("fp32")
  return float(train(step, step.init(PARAMS), 40, BATCH)[1]["loss"])


@pytest.mark.parametrize(
  ("master", "stored"),
  [(None, "float8_e4m3fn"), ("int16", "float32"), ("int8", "int8"), ("stochastic", "bfloat16")],
)
def test_it_learns_as_float32_state_does_and_a_skip_changes_no_bit(master, stored):
  step = make(policy_of(master, stored), skip_nonfinite=True)
  first = step.init(PARAMS)
  state, metrics = train(step, first, 40, BATCH)
  assert float(metrics["loss"]) == pytest.approx(loss_in_float32(), rel=0.2)
  after, _ = step(state, BATCH | {"x": BATCH["x"] * np.float32(np.nan)})
  kept = lambda state: (state.params, state.opt_state.inner_state)
  assert_same(kept(after), kept(state))
  assert described(after) == described(first)
  assert step.jitted._cache_size() == 1


def test_parameters_are_always_the_rounded_masters():
  # Rounded to 1, from below: what the step goes beyond 0 is less than a float32 update from 1 can say.
  masters = np.full((100, 1), 1 - 2.0**-12, np.float32)
  moves = -masters - np.float32(2.0**-24) * np.arange(100, dtype=np.float32)[:, None]
  tx = optax.stateless(lambda updates, params: {"w": jnp.where(params["w"] == 1, masters - 1, moves)})
  step = make(policy_of("int16", "float32"), tx, loss=lambda params, batch: params["w"].sum())
  values = lambda state: np.asarray(state.params["w"], np.float32)
  masters_of = lambda state: np.asarray(step.user_state(state)[0]["w"])
  first, _ = step(step.init({"w": np.ones_like(masters)}), BATCH)
  state, _ = step(first, BATCH)
  np.testing.assert_array_equal(masters_of(state), masters + moves)
  np.testing.assert_array_equal(values(state), (masters + moves).astype(jnp.bfloat16).astype(np.float32))
  # An own loop's updates are numbers, and may miss the rounded master; then it is what they made.
  updates, opt_state = jax.jit(step.tx.update)({"w": masters}, first.opt_state, first.params)
  own = state.replace(params=mpjax.apply_updates(first.params, updates), opt_state=opt_state)
  missed = values(own) != values(state)
  assert missed.any()
  assert np.abs(values(own) - values(state)).max() <= 2**-23
  np.testing.assert_array_equal(masters_of(own)[missed], values(own)[missed])


@functools.cache
def trained(name):
  step = make({"int16": policy_of("int16", "bfloat16")}.get(name, name))
  return step, train(step, step.init(PARAMS), 5, BATCH)[0]


@pytest.mark.parametrize(
  ("before", "after"),
  [
    ("fp32", "bf16_lean"),
    ("fp32", policy_of("int16", "float8_e4m3fn")),
    ("bf16_lean", "bf16"),
    ("int16", "bf16_lean"),
  ],
  ids=str,
)
def test_a_state_goes_from_one_policy_to_another(before, after):
  (old, state), new = trained(before), make(after)
  adopted = adopt(new, state, old)
  first = jax.eval_shape(new.init, PARAMS)
  assert described((adopted.params, adopted.opt_state)) == described((first.params, first.opt_state))
  tolerance = 0 if new.policy.master_weights in (None, "int16") else 2**-7
  (mine, (adam, *_)), (theirs, (its_adam, *_)) = new.user_state(adopted), old.user_state(state)
  for name in PARAMS:
    np.testing.assert_allclose(mine[name], theirs[name], rtol=tolerance, atol=tolerance * 1e-6)
  atol = np.max(its_adam.nu["w"]) * 1e-5
  np.testing.assert_allclose(adam.nu["w"], its_adam.nu["w"], rtol=0.15, atol=atol)


def test_state_that_is_quantised_by_tx_and_by_the_policy_is_adopted():
  few = mpjax.quantized_state(optax.adamw(1e-2), exclude="nu")
  for tx in (few, optax.chain(mpjax.quantized_state(optax.adamw(1e-2)))):
    old, new = make("fp32", tx), make("bf16_lean", tx)
    state, _ = train(old, old.init(PARAMS), 2, BATCH)
    adopted = adopt(new, state, old)
    assert described(adopted.opt_state) == described(jax.eval_shape(new.init, PARAMS).opt_state)
    moments = [jax.jit(in_full_bytes)(s) for s in (adopted.opt_state.inner_state, state.opt_state)]
    for mine, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=0.07, atol=np.max(np.abs(theirs)) * 1e-4)


@pytest.mark.parametrize(
  ("before", "after", "tx", "words"),
  [
    (
      "bf16",
      "bf16",
      optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
      r"the optimizer's state, its moments .*schedules \('1/0/count' was not there",
    ),
    (
      "bf16",
      "params=float16,compute=float16,output=float16",
      None,
      r".*'0/mu/b' was float32\[256\].* float16",
    ),
    ("fp16", {"base": "fp16", "loss_scaling": {"init_scale": 64.0}}, None, "the loss scale[.]"),
  ],
  ids=["other optimiser", "dtype that does not fit", "other loss scale"],
)
def test_what_begins_anew_is_named(before, after, tx, words):
  (old, state), new = trained(before), make(after, tx)
  with pytest.warns(UserWarning, match="anew while step is 5: " + words) as caught:
    adopted = new.adopt(state, before=old)
  if "MPJAX_TYPECHECK" not in os.environ:  # which puts a call of its own between
    assert caught[0].filename == __file__
  assert adopted.step == 5
  begun = lambda state: state.opt_state if before == "bf16" else mpjax.get_loss_scale(state.opt_state).scale
  assert_same(begun(adopted), begun(new.init(PARAMS)))
  with pytest.warns(UserWarning, match="anew: .*" + words):
    jax.eval_shape(lambda state: new.adopt(state, old), state)


def test_what_stays_a_first_state_and_one_that_is_meant_need_no_word():
  old, state = trained("bf16")
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for policy in ("fp32", "bf16", "bf16_lean", "fp16"):
      make(policy).adopt(state, old)
    new = make("bf16", optax.sgd(1e-2))
    new.adopt(old.init(PARAMS), old)
    new.adopt(state, old, warn=False)
