"""`TrainStep.user_state`: master parameters and the state of the optimiser that the user gave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax

KEY = jax.random.key(0)
PARAMS = {"w": jax.random.normal(KEY, (64, 64)) / 8, "b": jnp.zeros(64)}
BATCH = {"x": jax.random.normal(KEY, (32, 64)), "y": jnp.ones((32, 64))}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 256.0}}
POLICIES = {
  "fp32": "fp32",
  "fp16": FP16,
  "bf16_lean": "bf16_lean",
  "bf16_pure": "bf16_pure",
  "int16": {
    "base": FP16,
    "param_dtype": "bfloat16",
    "master_weights": "int16",
    "optimizer_dtype": "bfloat16",
  },
}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def train(step, state, steps=3):
  for _ in range(steps):
    state, _ = step(state, BATCH)
  return state


def described(tree):
  return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_state_is_as_the_optimiser_makes_it(policy, guarded):
  tx = optax.inject_hyperparams(optax.adamw, static_args=["mu_dtype"])(1e-2, mu_dtype=jnp.bfloat16)
  step = mpjax.make_train_step(loss_fn, tx, policy, skip_nonfinite=guarded)
  params, opt_state = step.user_state(train(step, step.init(PARAMS)))
  assert described(params) == described(PARAMS)
  assert described(opt_state) == described(tx.init(PARAMS))
  assert optax.tree_utils.tree_get(opt_state, "learning_rate") == np.float32(1e-2)
  assert optax.tree_utils.tree_get(opt_state, "b2") == np.float32(0.999)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_schedule_free_parameters_for_evaluation(policy):
  step = mpjax.make_train_step(loss_fn, contrib.schedule_free_adamw(1e-2), policy)
  plain = mpjax.make_train_step(loss_fn, contrib.schedule_free_adamw(1e-2), "fp32")
  params, opt_state = step.user_state(train(step, step.init(PARAMS), 5))
  found = contrib.schedule_free_eval_params(opt_state, params)
  state = train(plain, plain.init(PARAMS), 5)
  expected = contrib.schedule_free_eval_params(state.opt_state, state.params)
  moved = lambda tree: np.asarray(tree["w"] - PARAMS["w"])
  assert np.linalg.norm(moved(found) - moved(expected)) < 0.1 * np.linalg.norm(moved(expected))


def test_a_loss_scale_of_the_user_is_in_the_state():
  tx = mpjax.dynamic_loss_scale(mpjax.quantized_state(optax.adam(1e-2)))
  step = mpjax.make_train_step(loss_fn, tx, "bf16")
  state = train(step, step.init(PARAMS))
  jax.tree.map(np.testing.assert_array_equal, step.user_state(state)[1], state.opt_state)
  few = mpjax.make_train_step(loss_fn, mpjax.quantized_state(optax.adam(1e-2), exclude="nu"), "bf16_lean")
  assert described(few.user_state(few.init(PARAMS))[1]) == described(few.inner_tx.init(PARAMS))


@pytest.mark.parametrize("policy", ["fp32", "bf16_lean"])
def test_a_later_step_does_not_take_the_arrays(policy):
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), policy)
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  before = np.asarray(params["w"])
  train(step, state)
  np.testing.assert_array_equal(params["w"], before)
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))
  with pytest.raises(ValueError, match="deleted"):
    step.user_state(state)


@pytest.mark.parametrize("policy", ["fp32", "bf16_lean"])
def test_on_a_mesh_and_inside_jit(policy):
  mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
  make = lambda **options: mpjax.make_train_step(
    loss_fn, contrib.schedule_free_adamw(1e-2), policy, **options
  )
  step, alone = make(mesh=mesh, sharding={"w": ("fsdp", None)}), make()
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  for tree in (params, opt_state.z, opt_state.base_optimizer_state[0].nu):
    assert tree["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
  inside, _ = jax.jit(step.user_state)(state)
  jax.tree.map(np.testing.assert_array_equal, inside, params)
  whole, _ = alone.user_state(train(alone, alone.init(PARAMS)))
  assert jnp.mean(jnp.abs(params["w"] - whole["w"])) < 1e-3
  shapes = jax.eval_shape(step.user_state, state)
  assert described(shapes) == described((params, opt_state))


def test_what_is_not_trained_is_among_the_parameters():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), "bf16_lean", wrt="w")
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  assert described(params) == described(PARAMS)
  assert described(opt_state) == described(optax.adam(1e-2).init({"w": PARAMS["w"], "b": optax.MaskedNode()}))
  train(step, state)
  np.testing.assert_array_equal(params["b"], PARAMS["b"])


def test_an_average_of_weights_moves_where_bfloat16_stands_still():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16_lean")
  state = step.init(PARAMS)
  average, narrow = step.user_state(state)[0], jax.tree.map(jnp.copy, state.params)
  for _ in range(10):
    state, _ = step(state, BATCH)
    average = optax.incremental_update(step.user_state(state)[0], average, 1e-3)
    narrow = optax.incremental_update(state.params, narrow, 1e-3)
  start = PARAMS["w"].astype(jnp.bfloat16)
  assert (narrow["w"] == start).mean() > 0.9
  assert (average["w"] == start).mean() < 0.1


@pytest.mark.parametrize("policy", ["fp16", "bf16_lean"])
def test_on_explicit_axes(policy):
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    step = mpjax.make_train_step(loss_fn, contrib.muon(1e-2), policy, mesh=mesh)
    state = train(step, step.init(PARAMS), 2)
    params, opt_state = step.user_state(state)
    assert jax.typeof(params["w"]).sharding.spec == jax.typeof(state.params["w"]).sharding.spec
    assert described(opt_state) == described(step.inner_tx.init(PARAMS))
