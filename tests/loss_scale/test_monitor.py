"""Metrics, and the leaves that are not finite."""

import json

import jax
import numpy as np
import optax

import mpjax

F32 = np.float32
PARAMS = {"dense": {"w": np.ones((2, 3), F32), "b": np.ones(3, F32)}, "none": None}
BAD_W = np.asarray([[np.nan, np.inf, 1], [np.inf, -np.inf, 2]], F32)
BAD = {"dense": {"w": BAD_W, "b": np.ones(3, F32)}, "none": None}
COUNTS = "1 NaN, 2 +inf, 1 -inf of 6"
PLAIN = mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2)


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
