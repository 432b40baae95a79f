"""A loss, or a metric, over what rows have unequally many of: the same however a batch is divided."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import mpjax

LENGTHS = np.array([1, 9, 2, 8, 0, 0, 3, 10] * 2)  # of tokens that count in each row of 10; none in row 4
TOKENS = np.random.default_rng(0).normal(size=(16, 10, 8)).astype(np.float32)
BATCH = {
  "tokens": TOKENS,
  "targets": np.sin(TOKENS.sum(-1)),
  "mask": (np.arange(10) < LENGTHS[:, None]).astype(np.float32),
}
PARAMS = {
  "w": np.linspace(-0.1, 0.1, 128 * 8, dtype=np.float32).reshape(8, 128),
  "v": np.full(128, 0.1, np.float32),
}


def errors(params, batch):
  return (jnp.tanh(batch["tokens"] @ params["w"]) @ params["v"] - batch["targets"]) ** 2


def loss_fn(params, batch):
  losses, mask = errors(params, batch), batch["mask"]
  loss = mpjax.Average(jnp.sum(mask * losses), jnp.sum(mask))
  positive = (batch["targets"] > 0) & (mask > 0)
  return loss, {"share": mpjax.Average(positive.sum(), mask.sum()), "rows": jnp.asarray(mask.shape[0])}


def mesh(**axes):
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def reference():
  mean = lambda p: jnp.sum(BATCH["mask"] * errors(p, BATCH)) / BATCH["mask"].sum()
  return jax.value_and_grad(mean)(PARAMS)


def assert_close(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.linalg.norm(np.asarray(a) - b) <= tolerance * np.linalg.norm(b)


FP16 = dataclasses.replace(
  mpjax.get_policy("fp16"), loss_scaling=mpjax.LossScaling(kind="static", init_scale=4096.0)
)
DIVISIONS = {
  "whole": {},
  "micro-batches": {"accumulate": 8},
  "data": {"mesh": mesh(data=8)},
  "data and micro-batches": {"mesh": mesh(data=4), "accumulate": 4},
  "fsdp": {"mesh": mesh(data=2, fsdp=4), "accumulate": 2},
  "by block": {"mesh": mesh(data=2, fsdp=4), "gather": "block", "accumulate": 2},
}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(("policy", "tolerance"), [("fp32", 1e-5), (FP16, 5e-3)], ids=["fp32", "fp16"])
def test_loss_and_gradients_are_those_of_the_whole_batch(division, policy, tolerance):
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy, **DIVISIONS[division])
  state = step.init(PARAMS)
  loss, grads = step.gradients(state, BATCH)
  want_loss, want = reference()
  assert_close((loss, grads), (want_loss, want), tolerance)
  state, metrics = step(state, BATCH)
  assert_close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, want), tolerance)
  np.testing.assert_allclose(metrics["loss"], want_loss, rtol=tolerance)
  np.testing.assert_allclose(
    metrics["share"], np.sum((BATCH["targets"] > 0) & (BATCH["mask"] > 0)) / BATCH["mask"].sum(), rtol=1e-6
  )
  assert metrics["rows"] == 16


def test_a_batch_that_counts_nothing_moves_nothing():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp16", accumulate=2)
  state, metrics = step(step.init(PARAMS), {**BATCH, "mask": np.zeros_like(BATCH["mask"])})
  assert metrics["loss"] == 0
  assert metrics["grads_finite"]
  assert_close(state.params, PARAMS, 0)


def test_a_penalty_counts_once():
  def with_penalty(params, batch):
    return loss_fn(params, batch)[0] * 2 + 0.1 * jnp.sum(params["w"] ** 2)

  results = []
  for n in (1, 4):
    step = mpjax.make_train_step(with_penalty, optax.sgd(0.1), "fp32", accumulate=n)
    results.append(step.gradients(step.init(PARAMS), BATCH))
  assert_close(results[1], jax.tree.map(np.asarray, results[0]), 1e-5)


def test_own_loops_take_the_same_function():
  want_loss, want = reference()
  for policy in ("fp32", "fp16"):
    fun = mpjax.autocast(lambda p, b: loss_fn(p, b)[0], policy)
    assert float(fun(PARAMS, BATCH)) == pytest.approx(float(want_loss), rel=5e-3)
    opt_state = mpjax.with_loss_scaling(optax.sgd(0.1), mpjax.get_policy(policy).loss_scaling).init(PARAMS)
    scale = 1.0 if policy == "fp32" else mpjax.get_loss_scale(opt_state).scale
    loss, grads = mpjax.value_and_grad(fun, opt_state)(PARAMS, BATCH)
    assert_close((loss, grads), (want_loss, jax.tree.map(lambda g: g * scale, want)), 5e-3)
  value = jnp.asarray(mpjax.Average(jnp.float32(6), 4))
  assert value.dtype == jnp.float32
  assert value == 1.5


def test_sums_keep_their_range_under_a_half_precision_output():
  policy = "params=float16,compute=float16,output=float16"
  out = mpjax.autocast(lambda x: mpjax.Average(jnp.sum(x @ x), 10_001), policy)(jnp.full((64, 64), 4.0))
  assert out.total == 64 * 64 * 64 * 16
  assert out.count == 10_001


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (
      lambda p, b: mpjax.Average(errors(p, b), 3),
      r"loss whose total is float32\[16, 10\]: expected scalars",
    ),
    (lambda p, b: mpjax.Average(errors(p, b).sum(), b["mask"]), r"loss whose count is float32\[16, 10\]"),
    (
      lambda p, b: mpjax.Average(errors(p, b).sum(), jnp.sum(p["w"] ** 2)),
      "count .* depends on the parameters",
    ),
  ],
)
def test_what_is_no_average_is_refused(make, match):
  step = mpjax.make_train_step(make, optax.sgd(0.1), "bf16")
  with pytest.raises(ValueError, match=match):
    step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("combine", ["__add__", "__sub__", "__mul__", "__truediv__"])
def test_two_averages_have_no_sum(combine):
  with pytest.raises(TypeError, match="a count of its own"):
    getattr(mpjax.Average(1.0, 2), combine)(mpjax.Average(1.0, 3))


def test_an_average_that_loses_its_count_is_an_error_where_it_counts():
  lossy = lambda params, batch: 0.1 * jnp.sum(params["w"] ** 2) + loss_fn(params, batch)[0]
  whole = mpjax.make_train_step(lossy, optax.sgd(0.1), "fp32")
  whole(whole.init(PARAMS), BATCH)
  step = mpjax.make_train_step(lossy, optax.sgd(0.1), "fp32", accumulate=4)
  with pytest.raises(TypeError, match="write it first, as in average \\+ penalty"):
    step(step.init(PARAMS), BATCH)
  first = lambda params, batch: 1 - (np.float32(0.5) * loss_fn(params, batch)[0] - 1)
  results = []
  for n in (1, 4):
    step = mpjax.make_train_step(first, optax.sgd(0.1), "fp32", accumulate=n)
    results.append(step.gradients(step.init(PARAMS), BATCH))
  assert_close(results[1], jax.tree.map(np.asarray, results[0]), 1e-5)


def test_an_average_reads_as_a_number():
  average = mpjax.Average(jnp.float32(6), 4)
  assert f"{average:.2f}" == "1.50"
  assert average < 2
  assert average >= mpjax.Average(1.0, 1)
