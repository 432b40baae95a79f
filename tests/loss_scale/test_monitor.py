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

F32 = np.float32
PARAMS = {"dense": {"w": np.ones((2, 3), F32), "b": np.ones(3, F32)}, "none": None}
BAD_W = np.asarray([[np.nan, np.inf, 1], [np.inf, -np.inf, 2]], F32)
BAD = {"dense": {"w": BAD_W, "b": np.ones(3, F32)}, "none": None}
COUNTS = "1 NaN, 2 +inf, 1 -inf of 6"
PLAIN = mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2)


def tracked(**settings):
  return mpjax.loss_scale.track_skips(PLAIN, **settings)


def test_metrics_are_the_state_ready_for_a_logger():
  of_step = lambda state: mpjax.loss_scale.loss_scale_metrics(PLAIN.update(BAD, state, PARAMS)[1])
  numbers = {name: value.item() for name, value in jax.jit(of_step)(PLAIN.init(PARAMS)).items()}
  assert numbers == {
    "loss_scale": 2.0**15,
    "good_steps": 0,
    "skipped_steps": 1,
    "consecutive_skips": 1,
    "grads_finite": False,
    "updates_finite": True,
  }
  json.dumps(numbers)
  assert mpjax.loss_scale.loss_scale_metrics(optax.adam(0.1).init(PARAMS)) == {}
  groups = {"a": mpjax.dynamic_loss_scale(optax.sgd(0.1)), "b": mpjax.static_loss_scale(optax.sgd(0.1), 4.0)}
  metrics = mpjax.loss_scale.loss_scale_metrics(
    optax.partition(groups, {"x": "a", "y": "b"}).init({"x": 1.0, "y": 2.0})
  )
  scales = {name: float(value) for name, value in metrics.items() if name.endswith("/loss_scale")}
  assert {name.split("'")[1]: scale for name, scale in scales.items()} == {"a": 2.0**16, "b": 4.0}


def test_nonfinite_leaves_on_demand():
  tree = {**BAD, "c": np.asarray([complex(0, np.inf), 1], np.complex64), "i": np.arange(3)}
  rows = mpjax.loss_scale.nonfinite_leaves(tree)
  assert {path: str(row) for path, row in rows.items()} == {"dense/w": COUNTS, "c": "1 +inf of 2"}
  assert mpjax.loss_scale.nonfinite_leaves(PARAMS) == {}


def test_the_last_skip_is_explained_the_history_kept_and_no_update_changed():
  tx = tracked(history=4)
  state, plain_state = tx.init(PARAMS), PLAIN.init(PARAMS)
  assert mpjax.loss_scale.skip_report(state) is None
  step, plain = jax.jit(tx.update), jax.jit(PLAIN.update)
  for finite in (True, True, False, True, True, True):
    grads = PARAMS if finite else BAD
    updates, state = step(grads, state, PARAMS)
    expected, plain_state = plain(grads, plain_state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, (updates, state.inner_state), (expected, plain_state))
  report = mpjax.loss_scale.skip_report(state)
  assert (report.step, report.loss_scale) == (2, 2.0**17)
  assert str(report) == f"step 2 was skipped at loss scale 131072:\n  dense/w: {COUNTS}"
  history = mpjax.loss_scale.scale_history(state)
  np.testing.assert_array_equal(history["step"], [2, 3, 4, 5])
  np.testing.assert_array_equal(history["loss_scale"], np.asarray([2, 1, 1, 2]) * 2.0**16)
  np.testing.assert_array_equal(history["grads_finite"], [False, True, True, True])
  assert step._cache_size() == 1


def test_leaves_are_counted_only_on_a_skip():
  """NaN is a number that differs from itself: that comparison stands in a branch and nowhere else."""
  tx = tracked()
  jaxpr = jax.make_jaxpr(tx.update)(PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS).jaxpr

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
  tx = mpjax.loss_scale.track_skips(
    mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name="d"), axis_name=axis_name
  )
  grads = np.ones(16, F32)
  grads[[3, 12]] = np.nan
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = PartitionSpec("d"), PartitionSpec()
  step = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
  _, state = jax.jit(step(lambda grads, state: tx.update(grads, state)))(grads, tx.init(grads))
  assert str(mpjax.loss_scale.skip_report(state).leaves["value"]) == "2 NaN of 16"


def test_leaves_without_gradients_are_no_reason():
  tx = mpjax.loss_scale.track_skips(mpjax.dynamic_loss_scale(optax.sgd(0.1)))
  bad = np.asarray([np.nan, 1], F32)
  frozen = ("frozen", np.ones(3, F32), None)
  amax = ("_overwrite_with_gradient", {"amax": np.ones(2, F32)}, {"amax": np.full(2, np.inf, F32)})
  for other, param, grad in (frozen, amax):
    params = {"w": bad, other: param}
    _, state = jax.jit(tx.update)({"w": bad, other: grad}, tx.init(params), params)
    assert list(mpjax.loss_scale.skip_report(state).leaves) == ["w"], other


def test_a_record_of_an_ensemble_is_read_member_by_member():
  params = {"w": np.ones((2, 3), F32)}
  bad = {"w": np.asarray([[1, 1, 1], [np.nan, 1, 1]], F32)}
  tx = tracked()
  state = jax.jit(jax.vmap(lambda grads, params: tx.update(grads, tx.init(params), params)[1]))(bad, params)
  with pytest.raises(ValueError, match="of one"):
    mpjax.loss_scale.skip_report(state)
  members = [mpjax.loss_scale.skip_report(jax.tree.map(lambda x, i=i: x[i], state)) for i in range(2)]
  assert (members[0], str(members[1].leaves["w"])) == (None, "1 NaN of 3")


def test_what_is_unfit_is_named():
  for history in (0, -1, 2.5, True):
    with pytest.raises(ValueError, match="history="):
      tracked(history=history)
  with pytest.raises(ValueError, match=r"0 records.*mpjax\.loss_scale\.track_skips"):
    mpjax.loss_scale.skip_report(optax.adam(0.1).init(PARAMS))
  with pytest.raises(ValueError, match="no loss scale"):
    mpjax.loss_scale.track_skips(optax.adam(0.1)).init(PARAMS)
