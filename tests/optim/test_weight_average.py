"""`average_weights`: which weights it averages, in which dtype, and when; `evaluation_weights` finds them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from mpjax.optim import WeightAverageState, average_weights, evaluation_weights

F32 = np.float32
RNG = np.random.default_rng(0)
PARAMS = {"w": (RNG.normal(size=(64, 64)) / 8).astype(F32), "b": np.zeros(64, F32)}
BATCH = {"x": RNG.normal(size=(32, 64)).astype(F32), "y": np.ones((32, 64), F32)}
ADAM = optax.adam(1e-3)
MESH = {"mesh": jax.make_mesh((2, 4), ("data", "fsdp")), "sharding": {"w": ("fsdp", None)}}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def averaged(trees, decay):
  """The average of weights, the first and those after each update, in NumPy."""
  average = dict(trees[0])
  for t, new in enumerate(trees[1:]):
    keep = min(decay, (1 + t) / (10 + t))
    average = {name: keep * average[name] + (1 - keep) * np.asarray(new[name], F32) for name in new}
  return average


def assert_near(found, expected):
  assert found.keys() == expected.keys()
  for name in expected:
    assert found[name].dtype == F32
    np.testing.assert_allclose(found[name], expected[name], atol=1e-6)


@pytest.mark.parametrize(
  ("policy", "options"),
  [("fp16", {}), ({"base": "bf16_lean", "master_weights": "int16"}, MESH | {"accumulate": 2})],
  ids=["float32 parameters", "bfloat16 parameters on a mesh"],
)
def test_a_step_averages_its_master_weights(policy, options):
  step = mpjax.make_train_step(loss_fn, average_weights(ADAM, 0.5), policy, **options)
  state = step.init(PARAMS)
  masters = [step.user_state(state)[0]]
  for _ in range(12):
    state, _ = step(state, BATCH)
    masters.append(step.user_state(state)[0])
  found = evaluation_weights(state.params, state.opt_state)
  assert_near(found, averaged(masters, 0.5))
  assert_near(evaluation_weights(*step.user_state(state)), found)
  assert found["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)


def test_a_skipped_step_and_a_micro_batch_leave_the_average_as_it_was():
  inner = average_weights(ADAM)
  skips = mpjax.dynamic_loss_scale(inner)
  gathers = optax.MultiSteps(inner, 2).gradient_transformation()
  for tx, grad, counts in ((skips, np.inf, (0, 0)), (gathers, 1.0, (0, 1))):
    state = tx.init(PARAMS)
    for count in counts:
      grads = jax.tree.map(lambda p, grad=grad: jnp.full_like(p, grad), PARAMS)
      _, state = tx.update(grads, state, PARAMS)
      [found] = optax.tree_utils.tree_get_all_with_path(state, "updates")
      assert found[1] == count
      same = np.array_equal(evaluation_weights(PARAMS, state)["w"], PARAMS["w"])
      assert same == (count == 0)


def average_of(opt_state):
  found = lambda x: isinstance(x, WeightAverageState)
  return next(x for x in jax.tree.leaves(opt_state, is_leaf=found) if found(x)).average


def test_it_is_float32_beside_moments_in_8_bits_and_lies_where_parameters_lie():
  tx = average_weights(ADAM)
  few = jax.eval_shape(mpjax.quantized_state(tx, min_size=0).init, PARAMS)
  assert evaluation_weights(PARAMS, few)["w"].dtype == F32
  mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
  divided = MESH | {"mesh": mesh}
  step = mpjax.make_train_step(loss_fn, tx, "bf16_lean", **divided, offload="optimizer")
  at = step.layout.shardings(jax.eval_shape(step.init, PARAMS))
  found = average_of(at.opt_state)["w"]
  assert (found.spec, found.memory_kind) == (at.arrays["w"].spec, "pinned_host")


def test_only_trained_floating_parameters_have_an_average():
  step = mpjax.make_train_step(loss_fn, average_weights(ADAM), "bf16_lean", wrt="w")
  state = jax.eval_shape(step.init, PARAMS)
  found = evaluation_weights(state.params, state.opt_state)
  assert found["w"] is average_of(state.opt_state)["w"]
  assert (found["b"], average_of(state.opt_state)["b"]) == (state.params["b"], optax.MaskedNode())
  params = {"w": jnp.ones(3, jnp.float16), "count": jnp.ones(3, jnp.int32)}
  state = average_weights(optax.identity()).init(params)
  assert evaluation_weights(params, state)["count"] is params["count"]
  assert evaluation_weights(params, ADAM.init(params)) is params


def test_bad_arguments():
  guards = mpjax.dynamic_loss_scale(ADAM), mpjax.master_weights(ADAM), optax.apply_if_finite(ADAM, 3)
  for inner in (*guards, optax.MultiSteps(ADAM, 2)):
    with pytest.raises(ValueError, match="put that outside"):
      average_weights(optax.chain(inner)).init(PARAMS)
  for decay in (1, -0.1, True, "0.9", None):
    with pytest.raises(ValueError, match="decay="):
      average_weights(ADAM, decay)
  with pytest.raises(TypeError, match="average_weights"):
    average_weights(PARAMS)
  tx = average_weights(ADAM)
  with pytest.raises(ValueError, match="without params"):
    tx.update(PARAMS, tx.init(PARAMS))
