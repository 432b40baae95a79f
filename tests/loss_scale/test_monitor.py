"""Metrics, scale history and the reasons for skips."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpjax

PARAMS = {"dense": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "none": None}
BAD = {
  "dense": {"w": jnp.asarray([[jnp.nan, jnp.inf, 1], [jnp.inf, -jnp.inf, 2]]), "b": jnp.ones(3)},
  "none": None,
}


def tracked(**settings):
  return mpjax.track_skips(mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2), **settings)


def test_metrics_are_the_state_ready_for_a_logger():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  _, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
  metrics = jax.jit(mpjax.loss_scale_metrics)(state)
  numbers = {name: value.item() for name, value in metrics.items()}
  assert numbers == {
    "loss_scale": 2.0**15,
    "good_steps": 0,
    "skipped_steps": 1,
    "consecutive_skips": 1,
    "grads_finite": False,
    "updates_finite": True,
  }
  json.dumps(numbers)


def test_metrics_of_several_scales_carry_their_paths():
  groups = {"a": mpjax.dynamic_loss_scale(optax.sgd(0.1)), "b": mpjax.static_loss_scale(optax.sgd(0.1), 4.0)}
  metrics = mpjax.loss_scale_metrics(optax.partition(groups, {"x": "a", "y": "b"}).init({"x": 1.0, "y": 2.0}))
  scales = {name: float(value) for name, value in metrics.items() if name.endswith("/loss_scale")}
  assert sorted(scales.values()) == [4.0, 2.0**16]
  assert any("'a'" in name for name in scales)


def test_without_a_loss_scale_there_are_no_metrics():
  assert mpjax.loss_scale_metrics(optax.adam(0.1).init(PARAMS)) == {}


def test_nonfinite_leaves_on_demand():
  rows = mpjax.nonfinite_leaves({**BAD, "c": jnp.asarray([complex(0, np.inf), 1]), "i": np.arange(3)})
  assert {path: str(row) for path, row in rows.items()} == {
    "dense/w": "1 NaN, 2 +inf, 1 -inf of 6",
    "c": "1 +inf of 2",
  }
  assert mpjax.nonfinite_leaves(PARAMS) == {}


def test_the_last_skip_is_explained_and_the_history_kept():
  tx = tracked(history=4)
  state = tx.init(PARAMS)
  assert mpjax.skip_report(state) is None
  step = jax.jit(tx.update)
  for finite in (True, True, False, True, True, True):
    _, state = step(PARAMS if finite else BAD, state, PARAMS)
  report = mpjax.skip_report(state)
  assert (report.step, report.loss_scale) == (2, 2.0**17)
  assert str(report) == "step 2 was skipped at loss scale 131072:\n  dense/w: 1 NaN, 2 +inf, 1 -inf of 6"
  history = mpjax.scale_history(state)
  np.testing.assert_array_equal(history["step"], [2, 3, 4, 5])
  np.testing.assert_array_equal(history["loss_scale"], np.asarray([2, 1, 1, 2]) * 2.0**16)
  np.testing.assert_array_equal(history["grads_finite"], [False, True, True, True])
  assert step._cache_size() == 1


def test_tracking_changes_no_update():
  tx, plain = tracked(), mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2)
  state, plain_state = tx.init(PARAMS), plain.init(PARAMS)
  for grads in (PARAMS, BAD, PARAMS):
    updates, state = tx.update(grads, state, PARAMS)
    expected, plain_state = plain.update(grads, plain_state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
  jax.tree.map(np.testing.assert_array_equal, state.inner_state, plain_state)


def test_leaves_are_counted_only_on_a_skip():
  """NaN is a number that differs from itself: that comparison stands in a branch and nowhere else."""
  tx = tracked()
  jaxpr = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS).jaxpr

  def comparisons(jaxpr, in_branch=False):
    for equation in jaxpr.eqns:
      if equation.primitive.name == "ne" and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
        yield in_branch
      for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
          yield from comparisons(inner, in_branch or equation.primitive.name == "cond")

  found = list(comparisons(jaxpr))
  assert found
  assert all(found)


@pytest.mark.parametrize(("check_vma", "axis_name"), [(False, "d"), (True, "d"), (True, None)])
def test_counts_of_shards_are_added(check_vma, axis_name):
  tx = mpjax.track_skips(mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name="d"), axis_name=axis_name)
  grads = jnp.ones(16).at[jnp.asarray([3, 12])].set(jnp.nan)
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = PartitionSpec("d"), PartitionSpec()

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
  def step(grads, state):
    return tx.update(grads, state)

  _, state = jax.jit(step)(grads, tx.init(grads))
  assert mpjax.skip_report(state).leaves["value"] == mpjax.nonfinite_leaves(grads)["value"]


def test_parameters_without_a_gradient():
  params = {"w": jnp.ones(2), "frozen": jnp.ones(3)}
  tx = mpjax.track_skips(mpjax.dynamic_loss_scale(optax.sgd(0.1)))
  _, state = jax.jit(tx.update)({"w": jnp.asarray([jnp.nan, 1]), "frozen": None}, tx.init(params))
  assert list(mpjax.skip_report(state).leaves) == ["w"]


def test_leaves_that_are_no_gradients_are_no_reason():
  tree = {"w": jnp.ones(2), "_overwrite_with_gradient": {"amax": jnp.ones(2)}}
  tx = tracked()
  bad = jax.tree.map(lambda x: x * jnp.inf, tree)
  _, state = tx.update(bad, tx.init(tree), tree)
  assert list(mpjax.skip_report(state).leaves) == ["w"]


@pytest.mark.slow
def test_a_record_of_an_ensemble_is_read_member_by_member():
  params = {"w": jnp.ones((2, 3))}
  tx = tracked()
  _, state = jax.vmap(tx.update)({"w": params["w"].at[1, 0].set(jnp.nan)}, jax.vmap(tx.init)(params), params)
  with pytest.raises(ValueError, match="of one"):
    mpjax.skip_report(state)
  members = [mpjax.skip_report(jax.tree.map(lambda x: x[i], state)) for i in range(2)]
  assert (members[0], str(members[1].leaves["w"])) == (None, "1 NaN of 3")


@pytest.mark.parametrize("history", [0, -1, 2.5, True])
def test_an_unfit_history_is_named(history):
  with pytest.raises(ValueError, match="history="):
    tracked(history=history)


def test_no_record_and_no_scale_are_named():
  with pytest.raises(ValueError, match=r"0 records.*mpjax\.track_skips"):
    mpjax.skip_report(optax.adam(0.1).init(PARAMS))
  with pytest.raises(ValueError, match="no loss scale"):
    mpjax.track_skips(optax.adam(0.1)).init(PARAMS)
