"""A training step whose policy keeps master weights and the optimiser's state in few bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.optim import find_master_weights, merge_master_weights
from mpjax.optim._master_weights import split
from mpjax.step._optimizer import apply_step

KEY = jax.random.key(0)
PARAMS = {
  "w": jax.random.normal(KEY, (128, 256)) / 8,
  "b": jnp.zeros(256),
  "v": jax.random.normal(KEY, (256, 64)) / 16,
}
BATCH = {"x": jax.random.normal(KEY, (64, 128)), "y": jax.random.normal(KEY, (64, 64))}
MASTERS = ("int16", "int8", "stochastic", "float32")
STATES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def policy_of(master, state):
  base = {"base": "bf16", "optimizer_dtype": state}
  return base if master is None else base | {"param_dtype": "bfloat16", "master_weights": master}


def make(policy, tx=None, **options):
  return mpjax.make_train_step(loss_fn, tx or optax.adamw(1e-2), policy, **options)


def run(step, state, steps):
  for _ in range(steps):
    state, metrics = step(state, BATCH)
  return state, float(metrics["loss"])


@pytest.mark.parametrize("master", [None, *MASTERS])
@pytest.mark.parametrize("stored", STATES)
def test_it_learns_as_float32_state_does(master, stored):
  step = make(policy_of(master, stored))
  state = step.init(PARAMS)
  described = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  state, loss = run(step, state, 40)
  reference = make("fp32")
  _, expected = run(reference, reference.init(PARAMS), 40)
  assert loss == pytest.approx(expected, rel=0.2)
  assert str(jax.tree.map(lambda x: (x.shape, x.dtype), state)) == str(described)
  assert step.jitted._cache_size() == 1


def test_parameters_are_always_the_rounded_masters():
  inner = optax.sgd(1.0)
  step = make(policy_of("int16", "float32"), inner, donate=False)
  # Rounded to 1, from below: what the step goes beyond 0 is less than a float32 update from 1 can say.
  masters = {"w": jnp.full((100, 1), 1 - 2.0**-12)}
  grads = masters["w"] + 2.0**-24 * jnp.arange(100.0)[:, None]

  tx, exact = step.tx, step._exact_tx
  params, correction = split(masters["w"], "int16", np.dtype(jnp.bfloat16), KEY)
  state = tx.init({"w": params})._replace(correction={"w": correction})
  expected, _ = split(masters["w"] - grads, "int16", np.dtype(jnp.bfloat16), KEY)

  updates, _ = exact.update({"w": grads}, state, {"w": params})
  new = apply_step(step.policy, {"w": params}, updates)
  np.testing.assert_array_equal(new["w"], expected)

  updates, state = tx.update({"w": grads}, state, {"w": params})
  new = mpjax.apply_updates({"w": params}, updates)
  missed = np.asarray(new["w"] != expected)
  assert missed.any()
  assert np.abs(np.asarray(new["w"] - expected, np.float32)).max() <= 2**-23
  back, _ = merge_master_weights(new, state)
  np.testing.assert_array_equal(np.asarray(back["w"])[missed], np.asarray(new["w"], np.float32)[missed])


@pytest.mark.parametrize("before", ["fp32", "bf16_lean", policy_of("int16", "bfloat16")])
@pytest.mark.parametrize(
  "after", ["bf16", "bf16_lean", policy_of("int16", "float8_e4m3fn"), policy_of("stochastic", "int8")]
)
def test_a_state_goes_from_one_policy_to_another(before, after):
  old, new = make(before), make(after)
  state, _ = run(old, old.init(PARAMS), 5)
  masters = old_masters(state)
  adopted = new.adopt(state, old)
  first = new.init(PARAMS)
  describe = lambda s: str(jax.tree.map(lambda x: (x.shape, x.dtype), (s.params, s.opt_state)))
  assert describe(adopted) == describe(first)
  tolerance = 0 if new.policy.master_weights in (None, "int16") else 2**-7
  for mine, theirs in zip(jax.tree.leaves(old_masters(adopted)), jax.tree.leaves(masters), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * 1e-6)
  moments = [mpjax.dequantize_state(s.opt_state) for s in (adopted, state)]
  nu = [next(x for x in jax.tree.leaves(m, is_leaf=is_adam) if is_adam(x)).nu["w"] for m in moments]
  np.testing.assert_allclose(nu[0], nu[1], rtol=0.15, atol=float(nu[1].max()) * 1e-5)
  run(new, adopted, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_state_with_master_weights_of_ones_own_is_adopted(scaled):
  tx = mpjax.master_weights(optax.adamw(1e-2))
  tx = mpjax.dynamic_loss_scale(tx) if scaled else tx
  own, lean = make("bf16_pure", tx), make("bf16_lean")
  state, _ = run(own, own.init(PARAMS), 2)
  kept = own.adopt(state, own)
  jax.tree.map(np.testing.assert_array_equal, kept, state)
  run(lean, lean.adopt(kept, own), 1)


def test_state_that_is_quantised_by_tx_and_by_the_policy_is_adopted():
  whole = mpjax.quantized_state(optax.adamw(1e-2))
  half = mpjax.quantized_state(optax.adamw(1e-2), exclude="nu")
  for tx in (whole, half, optax.chain(whole)):
    old, new = make("fp32", tx), make("bf16_lean", tx)
    state, _ = run(old, old.init(PARAMS), 2)
    adopted = new.adopt(state, old)
    describe = lambda s: str(jax.tree.map(lambda x: (x.shape, x.dtype), s.opt_state))
    assert describe(adopted) == describe(new.init(PARAMS))
    moments = [mpjax.dequantize_state(s) for s in (adopted.opt_state.inner_state, state.opt_state)]
    for mine, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=0.07, atol=float(jnp.max(jnp.abs(theirs))) * 1e-4)
    run(new, adopted, 1)


def is_adam(x):
  return isinstance(x, optax.ScaleByAdamState)


def old_masters(state):
  found = find_master_weights(state.opt_state)
  return merge_master_weights(state.params, found[0])[0] if found else state.params


def test_a_step_in_place_is_compiled_once():
  step = mpjax.make_train_step(lambda m, x: jnp.mean(m(x) ** 2), optax.adamw(1e-2), "bf16_lean")
  model = step.policy.cast_to_param(nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  for _ in range(3):
    step(model, optimizer, jnp.ones((8, 64)))
  assert step.jitted._cache_size() == 1


def test_a_skipped_step_changes_no_bit():
  for policy in (
    "bf16_lean",
    policy_of("stochastic", "bfloat16"),
    {"base": "fp16", "optimizer_dtype": "int8"},
  ):
    step = make(policy, skip_nonfinite=True, donate=False)
    state, _ = run(step, step.init(PARAMS), 2)
    bad = BATCH | {"x": BATCH["x"].at[0, 0].set(jnp.nan)}
    after, _ = step(state, bad)
    inner = lambda s: s.opt_state.inner_state
    jax.tree.map(np.testing.assert_array_equal, (after.params, inner(after)), (state.params, inner(state)))


def test_a_step_of_ones_own_by_tx_is_that_of_the_step():
  step = make("bf16_lean", donate=False)
  state = step.init(PARAMS)
  _, grads = step.gradients(state, BATCH)
  updates, opt_state = jax.jit(step.tx.update)(grads, state.opt_state, state.params)
  mine = optax.apply_updates(state.params, updates)
  theirs, _ = step(state, BATCH)
  jax.tree.map(np.testing.assert_array_equal, mine, theirs.params)
  jax.tree.map(np.testing.assert_array_equal, opt_state, theirs.opt_state)


@pytest.mark.parametrize("master", MASTERS)
def test_overwritten_leaves_are_adopted(master):
  kept = "_overwrite_with_gradient"
  of = lambda params, batch: loss_fn(params, batch) + (params[kept]["s"] * 0.3).sum()
  step = mpjax.make_train_step(of, optax.adamw(1e-2), policy_of(master, "int8"), donate=False)
  state, _ = run(step, step.init(PARAMS | {kept: {"s": jnp.ones(3)}}), 1)
  adopted = step.adopt(state, step)
  jax.tree.map(np.testing.assert_array_equal, adopted.params[kept], state.params[kept])
  run(step, adopted, 1)


def test_overwritten_leaves_become_their_updates():
  params = {"w": jnp.ones((2, 2), jnp.bfloat16), "_overwrite_with_gradient": {"s": jnp.ones(3)}}
  updates = {"w": jnp.full((2, 2), 128.0), "_overwrite_with_gradient": {"s": jnp.full(3, 7.0)}}
  new = apply_step(mpjax.get_policy("bf16_lean"), params, updates)
  np.testing.assert_array_equal(new["w"], 2)  # a binade is 128 steps of bfloat16
  np.testing.assert_array_equal(new["_overwrite_with_gradient"]["s"], 7)
