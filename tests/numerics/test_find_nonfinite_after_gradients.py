"""`find_nonfinite` where gradients are finite: optimiser and model state are named, and never vouched for unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.numerics._faults import line_of

BATCH = np.ones((8, 4), np.float32)
PARAMS = dict.fromkeys(("w", "unused"), np.ones((4, 4), np.float32))
WHOLE = ("loss", "gradients", "updates", "parameters after the step", "optimiser state")
NO_EPS = optax.rmsprop(1e-3, eps=0.0)
# A model that is float16 throughout is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:policy 'float16' means float16 for everything")


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + 0 * params["unused"].sum()  # a gradient of 0


def stepped(tx, policy="fp32", loss=loss_fn, model_state=None, **options):
  """A step, and its state in the middle of a run."""
  step = mpjax.make_train_step(loss, tx, policy, donate=False, **options)
  return step, step.init(PARAMS, model_state=model_state).replace(step=np.int32(3))


def hunt(*args, reference=False, **options):
  return mpjax.find_nonfinite(*stepped(*args, **options), BATCH, reference=reference)


def words(report):
  """The text of a report without its line breaks."""
  return " ".join(str(report).split())


@pytest.mark.parametrize(
  ("policy", "options"),
  [
    ("fp32", {}),
    ("bf16", {"skip_nonfinite": True}),
    ("bf16_lean", {}),
    ("bf16", {"skip_nonfinite": True, "mesh": {"gather": "block"}}),
  ],
)
def test_a_division_by_zero_in_the_optimiser_is_named_whatever_skips_or_divides_it(policy, options):
  if mesh := options.get("mesh"):
    options = {**options, **mesh, "mesh": jax.make_mesh((4, 2), ("data", "fsdp"))}
  report = hunt(NO_EPS, policy, **options)
  origin = report.origin
  assert (origin.module, origin.primitive, origin.of_optimizer) == ("scale_by_rms", "rsqrt", True)
  assert not origin.backward
  assert {"updates['unused']", "parameters after the step ['unused']"} <= report.results.keys()
  assert report.results.keys() == report.compiled.keys()
  assert not any("'w'" in name or name in ("loss", "gradients") for name in report.results)
  lines = str(report).splitlines()
  assert len(lines) <= 12
  assert lines[0].startswith("scale_by_rms: rsqrt took the reciprocal of zero, optimiser: 16 +inf of 16")
  assert "the loss and the gradients are finite; non-finite: updates['unused']" in words(report)
  assert lines[-2] == "try: an eps (or eps_root) of the optimiser that is not 0: 1e-8"
  assert lines[-1].startswith("more: .table(")
  assert "rsqrt" in report.table("origins")
  assert "updates['unused']" in report.table("results")


def my_optimiser():
  def update(updates, state, params=None):
    return jax.tree.map(lambda g: jnp.log(g * 0), updates), state  # line of: update

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SQUARES = optax.stateless(lambda u, p: jax.tree.map(lambda g: g * 1e4, u))
OWN_LINE = line_of("update", __file__)


@pytest.mark.parametrize(
  ("tx", "policy", "result", "said"),
  [
    (
      optax.chain(SQUARES, optax.adam(1e-3)),
      "float16",
      "optimiser state ['1/0/nu/w']",
      ["float16", "optimizer_dtype: float32"],
    ),
    (
      my_optimiser(),
      "fp32",
      "updates['w']",
      [f"my_optimiser: log ({OWN_LINE}) took the log", "kept away from zero at"],
    ),
    (
      optax.chain(optax.sgd(-1.0), optax.scale(1e5)),
      {"base": "float16", "optimizer_dtype": "float32"},
      "parameters after the step ['w']",
      ["param_dtype: float32"],
    ),
    (
      mpjax.dynamic_loss_scale(NO_EPS),
      "fp32",
      "updates",
      [
        "scale_by_rms: rsqrt",
        "non-finite: updates, which the loss scale inside the optimiser replaces with zeros",
      ],
    ),
  ],
  ids=["an overflow", "a line of the user's own", "a parameter", "a loss scale of the optimiser's own"],
)
def test_what_goes_wrong_in_an_optimiser_is_named_with_a_way_out(tx, policy, result, said):
  report = hunt(tx, policy)
  assert not report.finite
  assert result in report.results
  assert len(report.results) == 1 or not result.startswith("parameters")
  assert all(text in words(report) for text in said), str(report)


def test_a_state_of_the_optimiser_that_is_not_finite_already_is_an_input():
  step, state = stepped(optax.adam(1e-3), "fp16")
  moments = state.opt_state.inner_state[0]
  bad = moments._replace(mu=moments.mu | {"w": np.full((4, 4), np.nan, np.float32)})
  opt_state = state.opt_state._replace(inner_state=(bad, *state.opt_state.inner_state[1:]))
  report = mpjax.find_nonfinite(step, state.replace(opt_state=opt_state), BATCH, reference=False)
  assert report.origin is None
  assert list(report.inputs) == ["opt_state.inner_state[0].mu['w']"]
  assert "an earlier checkpoint" in str(report)
  finite = mpjax.find_nonfinite(step, state, BATCH, reference=False)
  assert finite.parts == WHOLE
  assert f"({', '.join(WHOLE)})" in words(finite)
  assert "the compiled step does not give NaN" in words(finite)


@pytest.mark.parametrize("fault", [True, False])
def test_the_state_of_the_model_is_looked_at(fault):
  def loss(params, batch, model_state):
    mean = jnp.log(batch.mean(0) * (0 if fault else 1)) + model_state["mean"]
    return loss_fn(params, batch), {}, {"mean": mean}

  report = hunt(optax.sgd(0.1), "fp16", loss, {"mean": np.zeros(4, np.float32)})
  assert "model state" in report.parts
  assert report.finite == (not fault)
  if fault:
    origin = report.origin
    assert report.results.keys() == report.compiled.keys() == {"model state ['mean']"}
    assert (origin.primitive, origin.backward, origin.of_optimizer) == ("log", False, False)
    assert "the loss and the gradients are finite; non-finite: model state ['mean']" in str(report)


def test_gradients_that_are_not_finite_are_reported_without_the_optimiser():
  report = hunt(NO_EPS, loss=lambda p, b: jnp.log(p["w"] * 0).sum() + loss_fn(p, b))
  assert report.parts == ("loss", "gradients")
  assert all(name == "loss" or name.startswith("gradients") for name in report.results)
  assert not report.origin.of_optimizer


def test_what_is_not_trained_is_not_looked_at():
  assert "updates['unused']" in hunt(NO_EPS, "fp16", wrt=["w", "unused"]).results
  frozen = optax.partition({"on": NO_EPS, "off": optax.set_to_zero()}, {"w": "on", "unused": "off"})
  for tx, options in ((NO_EPS, {"wrt": "w"}), (frozen, {})):
    report = hunt(tx, "bf16_lean", skip_nonfinite=True, **options)
    assert report.finite
    assert not report.compiled
