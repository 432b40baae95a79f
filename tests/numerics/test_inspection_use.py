"""`inspect_numerics` as it is called: what it takes, refuses and gives back."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.numerics import inspection_programs
from mpjax.numerics._summary import Summary
from mpjax.numerics._tensors import BINS, INTEREST, KINDS, Magnitudes, full_summary
from tests.numerics._by_hand import (
  WIDTH,
  batch_of,
  loss_fn,
  magnitudes_of,
  near_counts,
  normal,
  params_of,
  report_of,
  scaled_policy,
)


def test_without_an_optimiser_nothing_is_said_of_updates():
  report = mpjax.inspect_numerics(loss_fn, params_of(), batch_of(), "bf16", advise=False)
  assert not report.of("update")
  assert not [f for f in report.findings if f.kind == "lost updates"]


@pytest.mark.slow
def test_the_programs_of_an_inspection_leave_the_state_and_agree_on_the_loss():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16")
  state, batch = step.init(params_of()), batch_of()
  programs = inspection_programs(step, state, batch)
  assert list(programs) == ["policy", "float32", "check"]
  (policy, own), (float32, wide), (check, same) = programs.values()
  assert own is state
  assert wide is same
  assert not wide.opt_state
  seen, reference = policy(own, batch), float32(wide, batch)
  assert seen.updates
  assert not reference.updates
  np.testing.assert_allclose(reference.loss, check(wide, batch), rtol=1e-6)
  np.testing.assert_allclose(seen.loss, reference.loss, rtol=0.02)


DEEP = 4


def scanned_loss(params, batch):
  def layer(x, w):
    with jax.named_scope("layers"):
      return x + jnp.tanh(x @ w), None

  out, _ = jax.lax.scan(layer, batch["x"], params["w"])
  return jnp.mean((out - batch["y"]) ** 2)


def test_steps_of_a_loop_are_layers():
  params = {"w": normal(7, DEEP, WIDTH, WIDTH, scale=0.2) * (4.0 ** jnp.arange(DEEP))[:, None, None]}
  batch = batch_of()
  report = mpjax.inspect_numerics(scanned_loss, params, batch, "fp32", advise=False)
  names = [t.module for t in report.of("activation") if t.name == "dot_general"]
  assert names == [f"layers[{i}]" for i in range(DEEP)]
  x = np.asarray(batch["x"])
  for i in range(DEEP):
    z = x @ np.asarray(params["w"][i])
    (t,) = [t for t in report.of("activation", f"layers[{i}]") if t.name == "dot_general"]
    assert near_counts(t.magnitudes, magnitudes_of(z))
    x = x + np.tanh(z)


def strict(text):
  def refuse(name):
    raise ValueError(name)

  return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("policy", ["fp16", "fp8"])
def test_the_dictionary_is_strict_json_of_the_documented_form(policy, tmp_path):
  report = report_of(policy)
  report.save_json(tmp_path / "report.json")
  data = strict((tmp_path / "report.json").read_text())
  assert data == strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data.keys() == {
    *("version", "title", "policy", "compute_dtype", "backend", "versions", "loss_scale", "step"),
    *(
      "batches",
      "rows",
      "loss",
      "bins",
      "formats",
      "stored",
      "lost_updates",
      "descent_quality",
      "tensors",
      "findings",
      "advice",
    ),
  }
  assert (data["version"], data["title"], data["bins"]) == (1, "mlp", list(BINS))
  assert data["formats"].keys() == {*INTEREST}
  for t in data["tensors"]:
    assert t["count"] == t["zero"] + t["below"] + sum(t["counts"]) + t["nan"] + t["inf"]
    assert len(t["counts"]) == len(data["bins"])
    assert (t["scaled_shares"] is not None) == (t["kind"] in ("activation gradient", "weight gradient"))
    assert (t["lost"] is not None) == (t["kind"] == "update")
    assert t["shares"].keys() == {*INTEREST}
  order = [(KINDS.index(t["kind"]), t["order"]) for t in data["tensors"]]
  assert order == sorted(order)
  assert data["advice"].keys() >= {"policy", "yaml", "lines", "measured", "unchanged"}
  mpjax.get_policy(data["advice"]["policy"])


def test_numbers_that_json_has_not_are_strings():
  batch = batch_of()
  batch["x"] = batch["x"].at[0, 0].set(jnp.nan)
  report = mpjax.inspect_numerics(loss_fn, params_of(), batch, "bf16", tx=optax.sgd(1e-2), advise=False)
  data = strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data["loss"] == {"policy": "nan", "reference": "nan"}
  (first, *_) = report.of("activation")
  assert (first.magnitudes.nan, first.policy[0]) == (WIDTH, WIDTH)


def test_the_text_has_every_finding():
  report = report_of("bf16_pure")
  text = str(report)
  assert report.findings
  assert all(finding.text in text for finding in report.findings)
  assert report.advice.yaml.rstrip() in text
  assert text.startswith("numerics of mlp: policy bf16_pure, 1 batch (16 rows), step 0")


STEP = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
WRONG = {
  "no batch": (lambda: (loss_fn, params_of(), []), {}, "no batch: expected"),
  "no batch left": (lambda: (loss_fn, params_of(), iter(())), {}, "no batch: expected"),
  "keep": (lambda: (loss_fn, params_of(), batch_of()), {"keep": 1.0}, "keep=1.0: expected a share"),
  "keep text": (
    lambda: (loss_fn, params_of(), batch_of()),
    {"keep": "most"},
    "keep='most': expected a share",
  ),
  "target": (
    lambda: ("gpt", params_of(), batch_of()),
    {},
    "target of type str: expected a TrainStep or a loss function",
  ),
  "state": (lambda: (STEP, params_of(), batch_of()), {}, "state of type dict: expected the TrainState"),
  "tx": (
    lambda: (STEP, STEP.init(params_of()), batch_of()),
    {"tx": optax.sgd(1.0)},
    "tx beside a TrainStep",
  ),
  "rng": (
    lambda: (STEP, STEP.init(params_of()), batch_of()),
    {"rng": jax.random.key(0)},
    "rng beside a TrainStep",
  ),
  "rng not taken": (
    lambda: (loss_fn, params_of(), batch_of()),
    {"rng": jax.random.key(0)},
    "loss_fn does not take 'rng'",
  ),
  "reference": (lambda: (loss_fn, params_of(), batch_of()), {"reference": "x"}, "reference='x': expected"),
  "policy": (lambda: (loss_fn, params_of(), batch_of(), "fp61"), {}, "unknown policy 'fp61'"),
  "accumulate": (
    lambda: (
      (step := mpjax.make_train_step(loss_fn, optax.sgd(1e-2), accumulate=3)),
      step.init(params_of()),
      batch_of(),
    ),
    {},
    "16 rows cannot be split into accumulate=3",
  ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(wrong):
  make, options, message = WRONG[wrong]
  with pytest.raises(ValueError, match=message):
    mpjax.inspect_numerics(*make(), **options)


@pytest.mark.slow
def test_a_step_is_inspected_under_another_policy_at_that_ones_loss_scale():
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "fp16")
  state = step.init(params_of())
  report = mpjax.inspect_numerics(step, state, batch_of(), scaled_policy(4.0), advise=False)
  assert (report.loss_scale, report.policy) == (4.0, mpjax.get_policy(scaled_policy(4.0)))
  later = state.replace(opt_state=state.opt_state._replace(scale=jnp.float32(32.0)))
  assert step.adopt(later, step).opt_state.scale == 32.0
  assert mpjax.inspect_numerics(step, later, batch_of(), advise=False).loss_scale == 32.0


def test_an_adopted_state_keeps_what_fits():
  adam = optax.adam(1e-2)
  step = mpjax.make_train_step(loss_fn, adam, "bf16", donate=False)
  state, _ = step(step.init(params_of()), batch_of())
  with pytest.warns(UserWarning, match="anew while step is 1: the optimizer's state"):
    narrow = step.with_policy("float16").adopt(state, step)
  assert {x.dtype.name for x in jax.tree.leaves(narrow.params)} == {"float16"}
  assert all(not np.any(m) for m in jax.tree.leaves(optax.tree.get(narrow.opt_state, "mu")))
  wide = step.with_policy("fp32").adopt(state, step)
  jax.tree.map(np.testing.assert_array_equal, wide.opt_state, state.opt_state)
  assert int(wide.step) == 1
  assert math.isfinite(float(step.with_policy("fp32")(wide, batch_of())[1]["loss"]))


def test_a_step_in_float32_with_another_loss_function_is_a_reference():
  doubled = mpjax.make_train_step(lambda p, b: 2 * loss_fn(p, b), optax.sgd(1e-2), "fp32")
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
  report = mpjax.inspect_numerics(step, step.init(params_of()), batch_of(), reference=doubled, advise=False)
  assert report.reference_loss == pytest.approx(2 * report.loss, rel=1e-2)
  assert all(0.45 < t.error < 0.55 for t in report.of("weight gradient"))


def test_the_sketch_is_not_needed_for_exact_counts():
  x = np.asarray([0.0, -0.0, 2.0**-70, 2.0**-64, 1.0, 2.0**40, np.inf, np.nan], np.float32)
  summary = Summary(full_summary(1.0).edges)
  m = Magnitudes.of(summary, np.asarray(summary(jnp.asarray(x))))
  below, counts = m.histogram
  assert (m.zero, below, counts[0], counts[-BINS[0]], counts[-1], m.inf, m.nan) == (2, 1, 1, 1, 1, 1, 1)


@pytest.mark.slow
def test_a_batch_on_an_explicit_mesh_is_inspected():
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  place = lambda tree, *axes: jax.device_put(tree, jax.NamedSharding(mesh, jax.P(*axes)))
  params = {"w": jnp.eye(8) * 0.5}
  batch = jnp.arange(32.0).reshape(4, 8) / 32
  loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
  expected = mpjax.inspect_numerics(loss_fn, params, batch, "fp16")
  with jax.set_mesh(mesh):
    found = mpjax.inspect_numerics(loss_fn, place(params), place(batch, "data"), "fp16")
  assert [t.magnitudes for t in found.tensors] == [t.magnitudes for t in expected.tensors]
