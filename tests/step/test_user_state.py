"""`TrainStep.user_state`: master parameters and the state of the optimiser that the user gave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax
from tests.step._problems import assert_near, assert_same

RNG = np.random.default_rng(0)
PARAMS = {"w": (RNG.normal(size=(64, 64)) / 8).astype(np.float32), "b": np.zeros(64, np.float32)}
BATCH = {"x": RNG.normal(size=(32, 64)).astype(np.float32), "y": np.ones((32, 64), np.float32)}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 256.0}}
INT16 = {"base": FP16, "param_dtype": "bfloat16", "master_weights": "int16", "optimizer_dtype": "bfloat16"}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def make(policy, tx, **options):
  return mpjax.make_train_step(loss_fn, tx, policy, **options)


def train(step, state, steps=3):
  for _ in range(steps):
    state, _ = step(state, BATCH)
  return state


def described(tree):
  return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def state_of(tx, params=PARAMS):
  return described(jax.eval_shape(tx.init, params))


ADAMW = optax.inject_hyperparams(optax.adamw, static_args=["mu_dtype"])(1e-2, mu_dtype=jnp.bfloat16)


def test_the_state_is_as_the_optimiser_makes_it():
  for policy in ("fp32", FP16, "bf16_lean", "bf16_pure", INT16):
    for guarded in (False, True):
      step = make(policy, ADAMW, skip_nonfinite=guarded)
      params, opt_state = jax.eval_shape(step.user_state, jax.eval_shape(step.init, PARAMS))
      assert described(params) == described(PARAMS), (policy, guarded)
      assert described(opt_state) == state_of(ADAMW), (policy, guarded)


@pytest.mark.parametrize("policy", ["bf16_lean", INT16], ids=str)
def test_a_later_step_does_not_take_the_arrays(policy):
  step = make(policy, ADAMW)
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  assert optax.tree_utils.tree_get(opt_state, "learning_rate") == np.float32(1e-2)
  assert optax.tree_utils.tree_get(opt_state, "b2") == np.float32(0.999)
  before = np.asarray(params["w"])
  train(step, state)
  np.testing.assert_array_equal(params["w"], before)
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))
  with pytest.raises(ValueError, match="deleted"):
    step.user_state(state)


def test_schedule_free_parameters_for_evaluation_on_a_mesh_and_inside_jit():
  make_for = lambda policy, **options: make(policy, contrib.schedule_free_adamw(1e-2), **options)
  mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
  step, alone = make_for("bf16_lean", mesh=mesh, sharding={"w": ("fsdp", None)}), make_for("fp32")
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  for tree in (params, opt_state.z, opt_state.base_optimizer_state[0].nu):
    assert tree["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
  assert_same(jax.jit(step.user_state)(state)[0], params)
  expected, its_state = alone.user_state(train(alone, alone.init(PARAMS)))
  way = lambda tree: np.asarray(tree["w"]) - PARAMS["w"]
  assert np.abs(way(params) - way(expected)).mean() < 1e-3
  found = contrib.schedule_free_eval_params(opt_state, params)
  want = way(contrib.schedule_free_eval_params(its_state, expected))
  assert_near(mpjax.optim.evaluation_weights(state.params, state.opt_state), found, rtol=1e-6)
  assert np.linalg.norm(way(found) - want) < 0.1 * np.linalg.norm(want)


def test_what_the_user_put_round_the_optimiser_is_in_the_state():
  tx = mpjax.dynamic_loss_scale(mpjax.quantized_state(optax.adam(1e-2)))
  step = make("bf16", tx)
  state = train(step, step.init(PARAMS))
  assert_same(step.user_state(state)[1], state.opt_state)
  few = make("bf16_lean", mpjax.quantized_state(optax.adam(1e-2), exclude="nu"))
  found = jax.eval_shape(few.user_state, jax.eval_shape(few.init, PARAMS))[1]
  assert described(found) == state_of(few.inner_tx)


def test_what_is_not_trained_is_among_the_parameters():
  step = make("bf16_lean", optax.adam(1e-2), wrt="w")
  state = train(step, step.init(PARAMS))
  params, opt_state = step.user_state(state)
  assert described(params) == described(PARAMS)
  assert described(opt_state) == state_of(optax.adam(1e-2), {"w": PARAMS["w"], "b": optax.MaskedNode()})
  train(step, state)
  np.testing.assert_array_equal(params["b"], PARAMS["b"])


def test_on_explicit_axes():
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    step = make("bf16_lean", contrib.muon(1e-2), mesh=mesh)
    state = train(step, step.init(PARAMS), 2)
    params, opt_state = step.user_state(state)
    assert jax.typeof(params["w"]).sharding.spec == jax.typeof(state.params["w"]).sharding.spec
    assert described(opt_state) == described(step.inner_tx.init(PARAMS))
  assert_near(params, PARAMS, rtol=0, atol=0.1)
