"""`make_train_step`: parameter trees and nnx; accumulation, skips, metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.step._problems import (
  BATCH,
  FP16,
  PARAMS,
  Model,
  X,
  Y,
  assert_near,
  assert_same,
  linen_loss,
  linen_variables,
  loss_and_gradients,
  loss_fn,
  nnx_loss,
  np_tree,
  train,
)

ONES = {"w": np.ones((4, 1), np.float32), "b": np.ones(1, np.float32)}
BY_CASTS = {"base": "bf16", "autocast": False}


def norm(grads):
  return np.sqrt(sum((g**2).sum() for g in grads.values()))


@pytest.mark.parametrize(
  ("policy", "accumulate"),
  [("fp32", 4), ("bf16", 1), ("fp16", 4), ("bf16_pure", 1), ("p=f32,c=f16,o=f16", 4)],
)
def test_every_policy_learns_and_keeps_its_dtypes(policy, accumulate):
  step = mpjax.make_train_step(loss_fn, optax.adam(0.3), policy, accumulate=accumulate)
  given = jax.tree.map(jnp.asarray, PARAMS)
  state = step.init(given)
  state, metrics = step(state, BATCH)
  first = float(metrics["loss"])
  state, metrics = train(step, state, 99)
  assert float(metrics["loss"]) < first / 50
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {step.policy.param_dtype}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {np.dtype("float32")}
  assert metrics["loss"].dtype == jnp.float32
  assert step.jitted._cache_size() == 1
  assert int(state.step) == 100
  assert given["w"].is_deleted() is False  # donation took copies


def test_the_loss_sees_the_compute_dtype_once_and_gradients_come_back_in_the_master_dtype():
  seen = []

  def loss(params, batch):
    seen.append(tuple(x.dtype.name for x in (params["w"], batch["x"], batch["n"])))
    return (params["w"] * batch["x"][0, 0]).sum()

  for options in ({}, {"cast_batch": False}):
    step = mpjax.make_train_step(loss, optax.sgd(0.1), BY_CASTS, **options)
    state = jax.eval_shape(step.init, PARAMS)
    _, grads = jax.eval_shape(step.loss_and_gradients, state, {"x": X, "n": np.arange(3)})
    assert grads["w"].dtype == "float32"
  assert seen == [("bfloat16", "bfloat16", "int32"), ("bfloat16", "float32", "int32")]


def test_micro_batches_make_the_step_of_the_whole_batch_and_metrics_of_it():
  def loss(params, batch):
    mean, rows = batch["y"].mean(), jnp.asarray(batch["x"].shape[0])
    return loss_fn(params, batch), {"mean": mean, "complex": mean * 1j, "rows": rows}

  step = mpjax.make_train_step(loss, optax.sgd(0.05), "fp32", accumulate=8)
  state, metrics = train(step, step.init(PARAMS), 3)
  expected = PARAMS
  for _ in range(3):
    value, grads = loss_and_gradients(expected)
    expected = {name: expected[name] - 0.05 * grads[name] for name in expected}
  assert_near((state.params, metrics["loss"]), (expected, value), rtol=1e-5)
  np.testing.assert_allclose((metrics["mean"], metrics["complex"].imag), Y.mean(), rtol=1e-5)
  assert int(metrics["rows"]) == 16


def test_accumulation_sums_in_float32():
  # In bfloat16 a sum of ones stalls at 256.
  loss = lambda params, batch: (params["w"].sum() * batch["x"]).sum()
  step = mpjax.make_train_step(loss, optax.sgd(1.0), "bf16", accumulate=1024)
  state, _ = step(step.init({"w": np.zeros(1)}), {"x": np.ones((1024, 1), np.float32)})
  np.testing.assert_allclose(state.params["w"], -1.0)


@pytest.mark.parametrize("policy", ["fp32", FP16, "bf16_pure", BY_CASTS], ids=str)
def test_unscaled_gradients_their_norm_and_a_skip_for_one_micro_batch(policy):
  tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(0.1))
  options = {"accumulate": 4, "skip_nonfinite": True, "grad_norm": True, "donate": False}
  step = mpjax.make_train_step(loss_fn, tx, policy, **options)
  state = step.init(ONES)
  loss, grads = step.gradients(state, BATCH)
  value, expected = loss_and_gradients(ONES)
  assert_near(grads, expected, rtol=2e-2, atol=2e-2)
  np.testing.assert_allclose(loss, value, rtol=5e-3)

  first, metrics = step(state, BATCH)
  np.testing.assert_allclose(metrics["grad_norm"], norm(expected), rtol=1e-5 if policy == "fp32" else 0.02)
  assert metrics["grad_norm"].dtype == jnp.float32

  x = X.copy()
  x[5, 2] = np.nan
  after, metrics = step(first, BATCH | {"x": x})
  inner = lambda state: (state.params, mpjax.get_loss_scale(state.opt_state).inner_state)
  assert_same(inner(after), inner(first))  # which lives on without donation
  assert not metrics["grads_finite"]
  assert not np.isfinite(metrics["grad_norm"])
  assert (int(metrics["skipped_steps"]), int(metrics["consecutive_skips"])) == (1, 1)
  assert int(after.step) == 2


def test_the_norm_leaves_out_what_is_no_gradient_and_the_name_is_taken_only_then():
  params = ONES | {"_overwrite_with_gradient": {"amax": np.ones(3, np.float32)}}
  of = lambda params, batch: loss_fn(params, batch) + 0 * params["_overwrite_with_gradient"]["amax"].sum()
  step = mpjax.make_train_step(of, optax.sgd(0.1), "fp32", grad_norm=True)
  state = step.init(params)
  _, metrics = step(state, BATCH)
  np.testing.assert_allclose(metrics["grad_norm"], norm(loss_and_gradients(ONES)[1]), rtol=1e-5)
  own = lambda params, batch: (loss_fn(params, batch), {"grad_norm": 1.0})
  with pytest.raises(ValueError, match=r"metric named 'grad_norm'.*rename it"):
    mpjax.make_train_step(own, optax.sgd(0.1), grad_norm=True)(step.init(ONES), BATCH)
  step = mpjax.make_train_step(own, optax.sgd(0.1), "fp32")
  assert step(step.init(ONES), BATCH)[1]["grad_norm"] == 1


@pytest.mark.parametrize(("scale", "finite", "factor"), [(2.0**8, True, 2), (2.0**24, False, 0.5)])
def test_metrics_report_the_scale_that_was_used_and_what_is_unscaled_by_it(scale, finite, factor):
  policy = {"base": "fp16", "loss_scaling": {"init_scale": scale, "growth_interval": 1}}
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.01), policy, grad_norm=True)
  state, metrics = step(step.init(PARAMS), BATCH)
  assert (float(metrics["loss_scale"]), bool(metrics["grads_finite"])) == (scale, finite)
  loss, grads = loss_and_gradients(PARAMS)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-3)
  if finite:
    np.testing.assert_allclose(metrics["grad_norm"], norm(grads), rtol=0.01)
  assert float(step(state, BATCH)[1]["loss_scale"]) == scale * factor


def test_nnx_modules_train_as_a_state_and_in_place_alike_and_skip():
  step = mpjax.make_train_step(nnx_loss, optax.adam(0.02), FP16)
  state = step.init(Model(nnx.Rngs(0)))
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  losses = []
  for _ in range(20):
    state, metrics = step(state, BATCH)
    in_place = step(model, optimizer, BATCH)
    losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(metrics["loss"], in_place["loss"], rtol=1e-3)
  assert losses[-1] < losses[0] / 2
  np.testing.assert_allclose(state.model.inner.kernel[...], model.inner.kernel[...], rtol=1e-2, atol=1e-3)
  assert model.norm.mean.dtype == jnp.float32
  assert np.asarray(model.norm.mean[...]).any()
  assert int(optimizer.step[...]) == int(model.drop.rngs.count[...]) == 20
  assert int(mpjax.get_loss_scale(optimizer).good_steps) == 20
  assert step.jitted._cache_size() == 2  # one trace for each way in
  kept = lambda: np_tree(nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))
  before = kept()
  assert not step(model, optimizer, BATCH | {"x": X * np.float32(np.inf)})["grads_finite"]
  assert_same(kept(), before)


def test_keys_differ_by_step_and_micro_batch_and_repeat_with_the_seed():
  loss = lambda params, batch, rng: (loss_fn(params, batch), {"draw": jax.random.uniform(rng) * 1e6})
  steps = {n: mpjax.make_train_step(loss, optax.sgd(0.0), "fp32", accumulate=n) for n in (1, 2)}

  def draws(accumulate, seed):
    state, out = steps[accumulate].init(PARAMS, rng=jax.random.key(seed)), []
    for _ in range(3):
      state, metrics = steps[accumulate](state, BATCH)
      out.append(float(metrics["draw"]))
    return out

  assert len(set(draws(1, 0))) == 3
  assert draws(1, 0) == draws(1, 0) != draws(1, 1)
  assert draws(2, 0) != draws(1, 0)


def test_matmul_precision_is_the_policys_or_the_callers():
  def precisions(policy):
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy)
    return str(step.jitted.trace(jax.eval_shape(step.init, PARAMS), BATCH).jaxpr).upper()

  assert "HIGH" in precisions("tf32") or "TF32" in precisions("tf32")
  with jax.default_matmul_precision("highest"):
    assert "HIGHEST" in precisions("fp32")
  assert "HIGHEST" not in precisions("fp32")


def test_overrides_and_accumulation_dtype_are_honoured():
  def make(**changes):
    step = mpjax.make_train_step(linen_loss, optax.adam(1e-2), {"base": "bf16", **changes})
    params, statistics = linen_variables()
    return step, jax.eval_shape(lambda: step.init(params, model_state=statistics))

  step, state = make(overrides={".*/head": "fp32"})
  explanation = step.explain(state, BATCH)
  assert explanation.matrix_flops() == {"bfloat16": 2 * 16 * 4 * 8, "float32": 2 * 16 * 8 * 1}
  assert {row.path for row in explanation.rows if row.flops and row.after == "float32"} == {"Net/head"}
  step, state = make(accum_dtype="float32")
  assert "tensor<4x8xbf16>) -> tensor<16x8xf32>" in step.jitted.lower(state, BATCH).as_text()
  step, state = make(overrides={"heat": "fp32"})
  with pytest.raises(ValueError, match=r"'heat' matches no module path.*Net/first.*Net/head"):
    step.explain(state, BATCH)
