"""A loss, or a metric, over what rows have unequally many of: the same however a batch is divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.step._problems import mesh

LENGTHS = np.array([1, 9, 2, 8, 0, 0, 3, 10] * 2)  # of tokens that count in each row of 10; none in row 4
TOKENS = np.random.default_rng(0).normal(size=(16, 10, 8)).astype(np.float32)
MASK = (np.arange(10) < LENGTHS[:, None]).astype(np.float32)
TARGETS = np.sin(TOKENS.sum(-1))
BATCH = {"tokens": TOKENS, "targets": TARGETS, "mask": MASK}
PARAMS = {
  "w": np.linspace(-0.1, 0.1, 128 * 8, dtype=np.float32).reshape(8, 128),
  "v": np.full(128, 0.1, np.float32),
}
FP16 = {"base": "fp16", "loss_scaling": 4096.0}


def errors(params, batch):
  return (jnp.tanh(batch["tokens"] @ params["w"]) @ params["v"] - batch["targets"]) ** 2


def loss_fn(params, batch):
  losses, mask = errors(params, batch), batch["mask"]
  loss = mpjax.Average(jnp.sum(mask * losses), jnp.sum(mask))
  positive = (batch["targets"] > 0) & (mask > 0)
  return loss, {"share": mpjax.Average(positive.sum(), mask.sum()), "rows": jnp.asarray(mask.shape[0])}


@functools.cache
def reference():
  """Returns the loss of the whole batch and its gradients, by JAX alone."""
  loss = lambda params: jnp.sum(MASK * errors(params, BATCH)) / MASK.sum()
  return jax.jit(jax.value_and_grad(loss))(PARAMS)


def assert_close(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.linalg.norm(np.asarray(a) - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize(
  ("policy", "tolerance", "options"),
  [
    (FP16, 5e-3, {}),
    ("fp32", 1e-5, {"accumulate": 8}),
    (FP16, 5e-3, {"mesh": mesh(data=4), "accumulate": 4}),
    (FP16, 5e-3, {"mesh": mesh(data=2, fsdp=4), "gather": "block"}),
  ],
  ids=["whole", "micro-batches", "mesh", "by block"],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(policy, tolerance, options):
  step = mpjax.make_train_step(loss_fn, optax.sgd(1.0), policy, **options)
  state = step.init(PARAMS)
  want_loss, want = reference()
  assert_close(step.gradients(state, BATCH), (want_loss, want), tolerance)
  state, metrics = step(state, BATCH)
  assert_close({k: PARAMS[k] - np.asarray(state.params[k]) for k in PARAMS}, want, 2 * tolerance)
  np.testing.assert_allclose(metrics["loss"], want_loss, rtol=tolerance)
  np.testing.assert_allclose(metrics["share"], ((TARGETS > 0) & (MASK > 0)).sum() / MASK.sum(), rtol=1e-6)
  assert metrics["rows"] == 16


def test_a_batch_that_counts_nothing_moves_nothing():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp16", accumulate=2)
  state, metrics = step(step.init(PARAMS), {**BATCH, "mask": np.zeros_like(MASK)})
  assert metrics["loss"] == 0
  assert metrics["grads_finite"]
  assert_close(state.params, PARAMS, 0)


def test_a_penalty_counts_once_and_numbers_of_any_kind_leave_the_count():
  def loss(params, batch):
    penalty = jnp.sum(params["w"] ** 2)
    average = 2 * (loss_fn(params, batch)[0] / 2 + 0.05 * penalty)
    return 1 - (np.float32(0.5) * (average + 0.1 * penalty) - 1)

  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", accumulate=4)
  value, grads = reference()
  penalty = 0.2 * (PARAMS["w"].astype(np.float64) ** 2).sum()
  found_value, found = step.gradients(step.init(PARAMS), BATCH)
  assert_close(found_value, 2 - 0.5 * (value + penalty), 1e-5)
  assert_close(found, {"w": -0.5 * (grads["w"] + 0.4 * PARAMS["w"]), "v": -0.5 * grads["v"]}, 1e-5)


def test_an_average_is_worth_a_number_and_two_have_no_sum():
  average = mpjax.Average(np.float32(6), 4)
  value = jnp.asarray(average)
  assert (value.dtype, float(value), float(average), f"{average:.2f}") == (jnp.float32, 1.5, 1.5, "1.50")
  assert 1 < average < 2
  assert mpjax.Average(1.0, 1) <= average <= 1.5
  for combine in ("__add__", "__sub__", "__mul__", "__truediv__"):
    with pytest.raises(TypeError, match="its own count"):
      getattr(average, combine)(mpjax.Average(1.0, 3))


def test_sums_keep_their_range_under_a_half_precision_output():
  policy = "params=float16,compute=float16,output=float16"
  fun = mpjax.autocast(lambda x: mpjax.Average(jnp.sum(x @ x), 10_001), policy)
  out = jax.jit(fun)(np.full((64, 64), 4.0, np.float32))
  assert out.total == 64 * 64 * 64 * 16
  assert out.count == 10_001


def test_what_is_no_average_or_loses_its_count_is_refused():
  lossy = lambda p, b: 0.1 * jnp.sum(p["w"] ** 2) + loss_fn(p, b)[0]
  whole = mpjax.make_train_step(lossy, optax.sgd(0.1), "fp32")  # where it needs no count
  state = jax.eval_shape(whole.init, PARAMS)
  jax.eval_shape(whole.jitted, state, BATCH)
  for loss, words in (
    (lambda p, b: mpjax.Average(errors(p, b), 3), r"total is float32\[4,10\]"),
    (lambda p, b: mpjax.Average(errors(p, b).sum(), b["mask"]), r"count is float32\[4,10\].*scalars"),
    (lambda p, b: mpjax.Average(errors(p, b).sum(), p["w"].sum()), "count .* depends on the parameters"),
    (lossy, r"write it first, as in average \+ penalty"),
  ):
    step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", accumulate=4)
    with pytest.raises(TypeError if loss is lossy else ValueError, match=words):
      jax.eval_shape(step.jitted, state, BATCH)
