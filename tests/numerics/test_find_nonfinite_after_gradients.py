"""`find_nonfinite` where gradients are finite: the optimiser and the model's state are named, and never vouched for unseen."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PARAMS = {"w": np.ones((4, 2), np.float32), "unused": np.ones(3, np.float32)}
BATCH = np.ones((8, 4), np.float32)
WHOLE = ("loss", "gradients", "updates", "parameters after the step", "optimiser state")


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + 0 * params["unused"].sum()  # a gradient of 0


def hunt(tx, policy="fp32", loss=loss_fn, model_state=None, reference=False, **options):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", mpjax.PrecisionWarning)  # of float16
    step = mpjax.make_train_step(loss, tx, policy, donate=False, **options)
  state = step.init(PARAMS, model_state=model_state).replace(step=jnp.int32(3))  # in the middle of a run
  return mpjax.find_nonfinite(step, state, BATCH, reference=reference), step(state, BATCH)


NO_EPS = optax.rmsprop(1e-3, eps=0.0)
GUARDED = {
  "no skip": (NO_EPS, "fp32", {}),
  "skip": (NO_EPS, "bf16", {"skip_nonfinite": True}),
  "loss scale": (NO_EPS, "fp16", {}),
  "few bytes": (NO_EPS, "bf16_lean", {}),
}


@pytest.mark.parametrize("guard", GUARDED)
def test_a_division_by_zero_in_the_optimiser_is_named_whatever_skips_it(guard):
  tx, policy, options = GUARDED[guard]
  report, _ = hunt(tx, policy, **options)
  origin = report.origin
  assert (origin.module, origin.primitive, origin.of_optimizer) == ("scale_by_rms", "rsqrt", True)
  assert not origin.backward
  assert {"updates['unused']", "parameters after the step ['unused']"} <= report.results.keys()
  assert report.results.keys() == report.compiled.keys()
  assert not any("'w'" in name or name in ("loss", "gradients") for name in report.results)
  first, second, last = str(report).split("\n")
  assert first.startswith("scale_by_rms: rsqrt took the reciprocal of zero, optimiser: 3 inf of 3 values")
  assert second.startswith("the loss and the gradients are finite; non-finite: updates['unused']")
  assert last == "try: an eps (or eps_root) of the optimiser that is not 0: 1e-8"


def test_adam_in_float16_divides_by_zero_and_the_way_out_is_right():
  report, (after, _) = hunt(optax.adam(1e-3), "float16", reference=True)
  assert np.isnan(after.params["unused"]).all()
  assert (report.origin.module, report.origin.primitive, report.origin.dtype) == (
    "scale_by_adam",
    "div",
    "float16",
  )
  assert report.in_float32 is False
  assert "optimizer_dtype: float32" in str(report)
  assert "1e-4" in str(report)
  wide = {"base": "float16", "optimizer_dtype": "float32"}
  for tx, policy in ((optax.adam(1e-3), wide), (optax.adam(1e-3, eps=1e-4), "float16")):
    mended, (after, _) = hunt(tx, policy)
    assert mended.finite
    assert mpjax.all_finite(after.params)


def test_an_optimiser_state_that_overflows_is_named_by_its_leaf():
  squares = optax.stateless(lambda u, p: jax.tree.map(lambda g: g * 1e4, u))
  report, _ = hunt(optax.chain(squares, optax.adam(1e-3)), "float16")
  assert "optimiser state ['1/0/nu/w']" in report.results
  assert "float16" in str(report)
  assert "optimizer_dtype: float32" in str(report)


def test_an_update_of_ones_own_is_named_by_its_line():
  def my_optimiser():
    def update(updates, state, params=None):
      return jax.tree.map(lambda g: jnp.log(g * 0), updates), state  # the line

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

  report, _ = hunt(my_optimiser())
  lines = pathlib.Path(__file__).read_text().splitlines()
  line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the line"))
  assert str(report).startswith(
    f"my_optimiser: log (test_find_nonfinite_after_gradients.py:{line}) took the log"
  )
  assert "kept away from zero at" in str(report)


def test_a_parameter_that_leaves_float16_asks_for_a_wider_one():
  report, _ = hunt(
    optax.chain(optax.sgd(-1.0), optax.scale(1e5)), {"base": "float16", "optimizer_dtype": "float32"}
  )
  assert report.results.keys() == {"parameters after the step ['w']"}
  assert "param_dtype: float32" in str(report)


def test_updates_that_a_loss_scale_in_the_optimiser_hides_are_found():
  report, (after, _) = hunt(mpjax.dynamic_loss_scale(NO_EPS))
  assert mpjax.all_finite(after.params)  # a skipped step
  assert not report.finite
  assert (report.origin.module, report.origin.primitive) == ("scale_by_rms", "rsqrt")
  assert "non-finite: updates, in whose place the loss scale inside the optimiser puts zeros" in str(report)


def test_a_state_of_the_optimiser_that_is_not_finite_already_is_an_input():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "fp16", donate=False)
  state = step.init(PARAMS)
  moments = state.opt_state.inner_state[0]
  bad = moments._replace(mu=moments.mu | {"w": jnp.full((4, 2), jnp.nan)})
  opt_state = state.opt_state._replace(inner_state=(bad, *state.opt_state.inner_state[1:]))
  report = mpjax.find_nonfinite(step, state.replace(opt_state=opt_state), BATCH, reference=False)
  assert report.origin is None
  assert list(report.inputs) == ["opt_state.inner_state[0].mu['w']"]
  assert "an earlier checkpoint" in str(report)


@pytest.mark.parametrize("fault", [True, False])
def test_the_state_of_the_model_is_looked_at(fault):
  def loss(params, batch, model_state):
    mean = jnp.log(batch.mean(0) * (0 if fault else 1)) + model_state["mean"]
    return loss_fn(params, batch), {}, {"mean": mean}

  report, _ = hunt(optax.sgd(0.1), "fp16", loss, {"mean": np.zeros(4, np.float32)})
  assert "model state" in report.parts
  assert report.finite == (not fault)
  if fault:
    assert report.results.keys() == report.compiled.keys() == {"model state ['mean']"}
    assert (report.origin.primitive, report.origin.backward, report.origin.of_optimizer) == (
      "log",
      False,
      False,
    )
    assert "the loss and the gradients are finite; non-finite: model state ['mean']" in str(report)


def test_a_finite_step_says_what_was_looked_at():
  report, _ = hunt(optax.adam(1e-3), "fp16")
  assert report.parts == WHOLE
  assert f"({', '.join(WHOLE)})" in str(report)
  assert "nor does the compiled step give NaN" in str(report)


def test_gradients_that_are_not_finite_are_reported_without_the_optimiser():
  report, _ = hunt(NO_EPS, loss=lambda p, b: jnp.log(p["w"] * 0).sum() + loss_fn(p, b))
  assert report.parts == ("loss", "gradients")
  assert all(name == "loss" or name.startswith("gradients") for name in report.results)
  assert not report.origin.of_optimizer


def test_what_is_not_trained_is_not_looked_at():
  assert "updates['unused']" in hunt(NO_EPS, "fp16", wrt=["w", "unused"])[0].results
  frozen = optax.partition({"on": NO_EPS, "off": optax.set_to_zero()}, {"w": "on", "unused": "off"})
  for tx, wrt in ((NO_EPS, "w"), (frozen, None)):
    options = {} if wrt is None else {"wrt": wrt}
    step = mpjax.make_train_step(loss_fn, tx, "bf16_lean", donate=False, skip_nonfinite=True, **options)
    report = mpjax.find_nonfinite(step, step.init(PARAMS), BATCH)
    assert report.finite
    assert not report.compiled


@pytest.mark.parametrize("gather", ["step", "block"])
def test_an_optimiser_on_a_mesh_is_looked_at(gather):
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
  report, _ = hunt(NO_EPS, "bf16", skip_nonfinite=True, mesh=mesh, gather=gather)
  assert (report.origin.module, report.origin.primitive) == ("scale_by_rms", "rsqrt")
  assert report.results.keys() == report.compiled.keys()
