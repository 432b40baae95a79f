"""`inspect_numerics` as it is called: what it takes, refuses and gives back, and what a second call compiles."""

import json
import re

import jax
import numpy as np
import pytest

import mpjax
from mpjax._render.plain_text import percent

# A report's dictionary has all bins and formats, and no other way tells which.
from mpjax.numerics._seen import BINS, INTEREST
from mpjax.numerics._tensors import KINDS
from tests.numerics._by_hand import (
  BATCH,
  PARAMS,
  TX,
  WIDTH,
  at_scale,
  look,
  loss_fn,
  magnitudes_of,
  report_of,
)


def strict(text):
  def refuse(name):
    raise ValueError(name)

  return json.loads(text, parse_constant=refuse)


FIELDS = "version title policy compute_dtype backend versions loss_scale step batches rows rows_left_out loss bins formats"
FIELDS += " lost_updates tensors verdict findings advice"


@pytest.mark.parametrize("policy", ["fp16", "fp8"])
def test_the_dictionary_is_strict_json_of_the_documented_form(policy, tmp_path):
  report = report_of(policy)
  report.save_json(tmp_path / "report.json")
  data = strict((tmp_path / "report.json").read_text())
  assert data == strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data.keys() == {*FIELDS.split()}
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
  assert data["advice"].keys() >= {"policy", "yaml", "lines", "unchanged"}
  mpjax.get_policy(data["advice"]["policy"])


def test_numbers_that_json_has_not_are_strings_and_values_are_counted_at_the_ends_of_histograms():
  x = BATCH["x"].copy()
  x[0, 0] = np.nan
  report = look("bf16", BATCH | {"x": x})
  data = strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data["loss"] == {"policy": "nan", "reference": "nan"}
  (first, *_) = report.of("activation")
  assert (first.magnitudes.nan, first.policy[0]) == (WIDTH, WIDTH)
  m = magnitudes_of(np.asarray([0.0, -0.0, 2.0**-70, 2.0**-64, 1.0, 2.0**40, np.inf, np.nan], np.float32))
  below, counts = m.histogram
  assert (m.zero, below, counts[0], counts[-BINS[0]], counts[-1], m.inf, m.nan) == (2, 1, 1, 1, 1, 1, 1)


def test_the_text_has_every_finding():
  report = report_of("bf16_pure")
  text = report.table("all")
  assert report.findings
  assert all(finding.text in " ".join(text.split()) for finding in report.findings)
  assert report.advice.yaml.rstrip() in text
  assert "numerics of mlp: policy bf16_pure, 1 batch (16 rows), step 0" in text
  assert report.tables == ("kinds", "modules", "findings", "advice")
  assert {line.split()[0] for line in report.table("modules").splitlines()[3:]} == {
    t.module for t in report.of("activation")
  }


def test_the_answer_begins_with_the_verdict_and_its_figures():
  report = report_of("fp16")
  first, second, *figures = str(report).splitlines()
  assert first == "numerics of mlp, policy fp16: the policy is good as it is"
  assert "loss scale 2^16; 1 batch (16 rows), step 0" in second
  lost = percent(report.lost("activation gradient", "float16", 2.0**16)).replace("0", "0%")
  assert figures[0].startswith(f"float16: gradients {lost} underflow to zero (")
  assert "overflow; values " in figures[0]
  worst = max(report.of("weight gradient"), key=lambda t: t.error)
  assert f"gradients of weights {worst.error:.2g} ({worst.path})" in figures[1]
  verdict = report.to_dict()["verdict"]
  assert (verdict["text"], verdict["good"]) == ("the policy is good as it is", True)


def test_wrong_arguments_are_named():
  step = mpjax.make_train_step(loss_fn, TX, "bf16")
  in_three = mpjax.make_train_step(loss_fn, TX, accumulate=3)
  of_loss, state = (loss_fn, PARAMS, BATCH), step.init(PARAMS)
  of_step, key = (step, state, BATCH), jax.random.key(0)
  rows = [
    ((loss_fn, PARAMS, []), {}, "no batch: expected"),
    ((loss_fn, PARAMS, iter(())), {}, "no batch: expected"),
    (of_loss, {"keep": 1.0}, "keep=1.0: expected a share"),
    (of_loss, {"keep": "most"}, "keep='most': expected a share"),
    (of_step, {"tx": TX}, "tx with a TrainStep"),
    (of_step, {"rng": key}, "rng with a TrainStep"),
    (of_loss, {"rng": key}, "loss_fn does not take 'rng'"),
    (of_loss, {"reference": "x"}, "reference='x': expected"),
    (of_loss, {"policy": "fp61"}, "unknown policy 'fp61'"),
    ((in_three, in_three.init(PARAMS), BATCH), {}, "16 rows cannot be split into accumulate=3"),
  ]
  for args, options, message in rows:
    with pytest.raises(ValueError, match=re.escape(message)):
      mpjax.inspect_numerics(*args, **options)


def test_a_step_is_inspected_at_its_loss_scale_and_under_another_policy_at_that_ones():
  step = mpjax.make_train_step(loss_fn, TX, "fp16")
  state = step.init(PARAMS)
  other = {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": 4.0}}
  report = mpjax.inspect_numerics(step, state, BATCH, policy=other, reference=False)
  assert (report.loss_scale, report.policy) == (4.0, mpjax.get_policy(other))
  later = at_scale(state, 32.0)
  assert step.adopt(later, step).opt_state.scale == 32.0
  assert mpjax.inspect_numerics(step, later, BATCH, reference=False).loss_scale == 32.0


def test_a_step_in_float32_with_another_loss_function_is_a_reference():
  doubled = mpjax.make_train_step(lambda p, b: 2 * loss_fn(p, b), TX, "fp32")
  step = mpjax.make_train_step(loss_fn, TX, "bf16")
  report = mpjax.inspect_numerics(step, step.init(PARAMS), BATCH, reference=doubled, advise=False)
  assert report.reference_loss == pytest.approx(2 * report.loss, rel=1e-2)
  assert all(0.45 < t.error < 0.55 for t in report.of("weight gradient"))
