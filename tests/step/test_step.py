"""`make_train_step`: parameter trees, linen with BatchNorm, nnx; accumulation, skips, metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.step._problems import BATCH, FP16, PARAMS, Model, Net, X, Y, linen_loss, loss_fn, nnx_loss, train


@pytest.mark.parametrize("policy", ["fp32", "tf32", "bf16", "fp16", "bf16_pure", "auto", "p=f32,c=f16,o=f16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_policy_learns_and_keeps_its_dtypes(policy, accumulate):
  step = mpjax.make_train_step(loss_fn, optax.adam(0.3), policy, accumulate=accumulate)
  state = step.init(PARAMS)
  first = float(step(step.init(PARAMS), BATCH)[1]["loss"])
  state, metrics = train(step, state, 100)
  assert float(metrics["loss"]) < first / 50
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {step.policy.param_dtype}
  assert metrics["loss"].dtype == jnp.float32
  assert step.jitted._cache_size() == 1
  assert int(state.step) == 100
  assert jax.tree.leaves(PARAMS)[0].is_deleted() is False  # donation took copies


def test_a_float32_step_is_plain_optax_bit_for_bit():
  tx = optax.adamw(0.1)
  step = mpjax.make_train_step(loss_fn, tx, "fp32")

  @jax.jit
  def plain(params, state):
    grads = jax.grad(loss_fn)(params, BATCH)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, opt_state, state = PARAMS, tx.init(PARAMS), step.init(PARAMS)
  for _ in range(5):
    params, opt_state = plain(params, opt_state)
    state, metrics = step(state, BATCH)
  jax.tree.map(np.testing.assert_array_equal, (params, opt_state), (state.params, state.opt_state))
  assert metrics.keys() == {"loss"}


def test_the_loss_sees_the_compute_dtype_once_and_gradients_come_back_in_the_master_dtype():
  seen = []

  def loss(params, batch):
    seen.append((params["w"].dtype, batch["x"].dtype, batch["n"].dtype))
    return (params["w"] * batch["x"][0, 0]).sum()

  update_dtypes = []

  def update(grads, state, params=None):
    update_dtypes.append(grads["w"].dtype)
    return grads, state

  tx = optax.GradientTransformation(lambda params: (), update)
  policy = {"base": "bf16", "autocast": False}
  step = mpjax.make_train_step(loss, tx, policy)
  step(step.init(PARAMS), {"x": X, "n": np.arange(3)})
  assert seen == [(jnp.bfloat16, jnp.bfloat16, jnp.int32)]
  assert set(update_dtypes) == {np.dtype("float32")}
  uncast = mpjax.make_train_step(loss, tx, policy, cast_batch=False)
  uncast(uncast.init(PARAMS), {"x": X, "n": np.arange(3)})
  assert seen[-1][1] == jnp.float32


def test_accumulation_equals_the_whole_batch():
  results = []
  for accumulate in (1, 2, 8):
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.05), "fp32", accumulate=accumulate)
    state, metrics = train(step, step.init(PARAMS), 3)
    results.append((state.params, metrics["loss"]))
  for other in results[1:]:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results[0], other)


def test_accumulation_sums_in_float32():
  # In bfloat16 a sum of ones stalls at 256.
  def loss(params, batch):
    return (params["w"].sum() * batch["x"]).sum()

  step = mpjax.make_train_step(loss, optax.sgd(1.0), "bf16", accumulate=1024)
  state, _ = step(step.init({"w": jnp.zeros(1)}), {"x": np.ones((1024, 1), np.float32)})
  np.testing.assert_allclose(state.params["w"], -1.0)


@pytest.mark.parametrize("policy", [FP16, "bf16"])
def test_one_non_finite_micro_batch_skips_the_whole_step(policy):
  step = mpjax.make_train_step(loss_fn, optax.adam(0.1), policy, accumulate=4, skip_nonfinite=True)
  state, _ = step(step.init(PARAMS), BATCH)
  before = jax.tree.map(np.asarray, (state.params, mpjax.get_loss_scale(state.opt_state).inner_state))
  x = X.copy()
  x[5, 2] = np.nan
  state, metrics = step(state, BATCH | {"x": x})
  jax.tree.map(
    np.testing.assert_array_equal, before, (state.params, mpjax.get_loss_scale(state.opt_state).inner_state)
  )
  assert not metrics["grads_finite"]
  assert (int(metrics["skipped_steps"]), int(metrics["consecutive_skips"])) == (1, 1)
  assert int(state.step) == 2


def test_metrics_report_the_scale_that_was_used_and_the_unscaled_loss():
  policy = {"base": "fp16", "loss_scaling": {"init_scale": 2.0**24}}
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.01), policy)
  state, metrics = step(step.init(PARAMS), BATCH)
  assert float(metrics["loss_scale"]) == 2.0**24
  assert not metrics["grads_finite"]
  np.testing.assert_allclose(metrics["loss"], loss_fn(PARAMS, BATCH), rtol=2e-3)
  _, metrics = step(state, BATCH)
  assert float(metrics["loss_scale"]) == 2.0**23


def test_metrics_of_the_user_are_averaged_or_summed_over_micro_batches():
  def loss(params, batch):
    return loss_fn(params, batch), {"mean": batch["y"].mean(), "rows": jnp.asarray(batch["x"].shape[0])}

  step = mpjax.make_train_step(loss, optax.sgd(0.01), "fp32", accumulate=4)
  _, metrics = step(step.init(PARAMS), BATCH)
  np.testing.assert_allclose(metrics["mean"], Y.mean(), rtol=1e-5)
  assert int(metrics["rows"]) == 16


@pytest.mark.parametrize("policy", ["fp32", "bf16", FP16])
def test_linen_statistics_stay_float32_and_are_not_updated_on_a_skip(policy):
  variables = Net().init(jax.random.key(0), X, False)
  stats = {"batch_stats": variables["batch_stats"]}
  step = mpjax.make_train_step(linen_loss, optax.adam(0.1), policy, skip_nonfinite=True)
  state = step.init(variables["params"], model_state=stats)
  state, first = step(state, BATCH)
  moved = np.asarray(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
  assert (moved != 0).any()
  assert {leaf.dtype.name for leaf in jax.tree.leaves(state.model_state)} == {"float32"}
  state, metrics = step(state, BATCH | {"x": X * np.nan})
  assert not metrics["grads_finite"]
  np.testing.assert_array_equal(state.model_state["batch_stats"]["BatchNorm_0"]["mean"], moved)
  state, last = train(step, state, 40)
  assert float(last["loss"]) < float(first["loss"]) / 5
  assert step.jitted._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_nnx_modules_train_as_a_state_and_in_place_alike(policy):
  step = mpjax.make_train_step(nnx_loss, optax.adam(0.02), policy, skip_nonfinite=True)
  state = step.init(Model(nnx.Rngs(0)))
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  first = None
  for _ in range(30):
    state, metrics = step(state, BATCH)
    in_place = step(model, optimizer, BATCH)
    first = float(metrics["loss"]) if first is None else first
    np.testing.assert_allclose(metrics["loss"], in_place["loss"], rtol=1e-3)
  assert float(metrics["loss"]) < first / 3
  np.testing.assert_allclose(state.model.inner.kernel[...], model.inner.kernel[...], rtol=1e-2, atol=1e-3)
  assert model.norm.mean.dtype == jnp.float32
  assert (model.norm.mean[...] != 0).any()
  assert int(optimizer.step[...]) == 30
  assert int(mpjax.get_loss_scale(optimizer).good_steps) == 30 - int(in_place["skipped_steps"])
  assert step.jitted._cache_size() == 2  # one trace for each way in


def test_nnx_statistics_are_not_updated_on_a_skip():
  step = mpjax.make_train_step(nnx_loss, optax.adam(0.02), "fp16")
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))
  metrics = step(model, optimizer, BATCH | {"x": X * np.inf})
  assert not metrics["grads_finite"]
  jax.tree.map(
    np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
  )


def test_keys_differ_by_step_and_micro_batch_and_repeat_with_the_seed():
  def loss(params, batch, rng):
    return loss_fn(params, batch), {"draw": jax.random.uniform(rng) * 1e6}

  def draws(accumulate, seed):
    step = mpjax.make_train_step(loss, optax.sgd(0.0), "fp32", accumulate=accumulate)
    state = step.init(PARAMS, rng=jax.random.key(seed))
    out = []
    for _ in range(3):
      state, metrics = step(state, BATCH)
      out.append(float(metrics["draw"]))
    return out

  assert len(set(draws(1, 0))) == 3
  assert draws(1, 0) == draws(1, 0) != draws(1, 1)
  assert draws(2, 0) != draws(1, 0)


def test_matmul_precision_is_the_policys_or_the_callers():
  def precisions(policy):
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy)
    return str(jax.make_jaxpr(step.jitted)(step.init(PARAMS), BATCH))

  assert "HIGH" in precisions("tf32") or "TF32" in precisions("tf32").upper()
  with jax.default_matmul_precision("highest"):
    assert "HIGHEST" in precisions("fp32")
  assert "HIGHEST" not in precisions("fp32")


def test_bfloat16_parameters_get_float32_optimizer_state():
  step = mpjax.make_train_step(loss_fn, optax.adam(0.1), "bf16_pure")
  state = step.init(PARAMS)
  assert state.params["w"].dtype == jnp.bfloat16
  assert state.opt_state[0].nu["w"].dtype == jnp.float32


def test_gradients_are_shown_unscaled_and_nothing_changes():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), FP16, accumulate=2)
  state = step.init(PARAMS)
  loss, grads = step.gradients(state, BATCH)
  expected = jax.grad(loss_fn)(PARAMS, BATCH)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2), grads, expected)
  np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCH), rtol=5e-3)
  assert not state.params["w"].is_deleted()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("policy", ["fp32", FP16, "bf16_pure", {"base": "bf16", "autocast": False}])
def test_the_norm_of_unscaled_gradients_is_reported_if_asked_for(policy, accumulate):
  tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
  step = mpjax.make_train_step(loss_fn, tx, policy, accumulate=accumulate, grad_norm=True)
  params = {"w": jnp.ones((4, 1)), "b": jnp.ones(1)}
  _, metrics = step(step.init(params), BATCH)
  grads = jax.grad(loss_fn)(params, BATCH)
  expected = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5 if policy == "fp32" else 0.02)
  assert metrics["grad_norm"].dtype == jnp.float32
  plain = mpjax.make_train_step(loss_fn, tx, policy, accumulate=accumulate)
  assert "grad_norm" not in plain(plain.init(params), BATCH)[1]


def test_the_norm_of_gradients_is_infinite_on_a_skip_and_leaves_out_what_is_no_gradient():
  params = {"w": jnp.ones((4, 1)), "b": jnp.ones(1), "_overwrite_with_gradient": {"amax": jnp.ones(3)}}
  of = lambda params, batch: loss_fn(params, batch) + 0 * params["_overwrite_with_gradient"]["amax"].sum()
  step = mpjax.make_train_step(of, optax.sgd(0.1), "fp32", skip_nonfinite=True, grad_norm=True)
  state, metrics = step(step.init(params), BATCH)
  expected = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(jax.grad(loss_fn)(params, BATCH))))
  np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)
  _, metrics = step(state, {"x": X * np.float32(np.inf), "y": Y})
  assert not np.isfinite(metrics["grad_norm"])
  named = lambda params, batch: (loss_fn(params, batch), {"grad_norm": jnp.ones([])})
  with pytest.raises(ValueError, match=r"metric named 'grad_norm'.*rename it"):
    mpjax.make_train_step(named, optax.sgd(0.1), grad_norm=True)(step.init(params), BATCH)
  ours = mpjax.make_train_step(named, optax.sgd(0.1), "fp32")
  assert ours(ours.init({"w": jnp.ones((4, 1)), "b": jnp.ones(1)}), BATCH)[1]["grad_norm"] == 1


def test_without_donation_the_old_state_lives_on():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", donate=False)
  state = step.init(PARAMS)
  step(state, BATCH)
  assert not state.params["w"].is_deleted()


def test_a_scale_of_the_users_own_is_used():
  tx = optax.chain(mpjax.dynamic_loss_scale(optax.sgd(0.01), init_scale=64.0))
  step = mpjax.make_train_step(loss_fn, tx, {"base": "fp16", "loss_scaling": None})
  _, metrics = step(step.init(PARAMS), BATCH)
  assert float(metrics["loss_scale"]) == 64
