"""The gpu suite of the benchmarks: what it says of a run, and that its processes train on a CPU."""

import jax.numpy as jnp
import pytest

from benchmarks.gpu import _suite as gpu
from benchmarks.gpu._jax_rows import PEAKS, square_product
from benchmarks.gpu._stage import Stage, paired


def row(seconds, peak, gigabytes=None, group="first.0", first=0, **more):
  measured = {"rounds_s": [seconds, seconds * 1.1, seconds * 0.9], "groups": {group: first}, "peak": peak}
  memory = {} if gigabytes is None else {"peak_bytes": gigabytes * 1e9, "state_bytes": 2e9}
  return measured | memory | more


@pytest.fixture
def report():
  reference = gpu._rows.REFERENCE
  rows = {
    "fp32": row(0.4, "float32", 12.0),
    "bf16": row(0.1, "bfloat16", 7.5),
    reference: row(0.1, "bfloat16", 8.0),
    "fp16": row(0.11, "float16", 7.0),
    "fp8, current": row(0.08, "float8", 7.5),
    "torch, bf16": row(0.12, "bfloat16", 7.0),
    "torch, fp16": {"peak": "float16", "skipped": "no time left of --minutes"},
  }
  model = {
    "title": "GPT",
    "unit": "tokens",
    "units": 8192,
    "seq": 1024,
    "batch": 8,
    "flops": 40e12,
    "rows": rows,
  }
  model["fp8_share"] = {"fp8, current": 0.5}
  peaks = {"float32": 150e12, "bfloat16": 800e12, "float16": 800e12, "float8": 1600e12}
  report = {"command": "python scripts/bench.py gpu", "device": "a GPU", "versions": {"jax": "1"}}
  report |= {
    "size": "full",
    "peaks": peaks,
    "models": {"gpt-124m": model, "gpt-1b": model | {"title": "large"}},
  }
  gpu._summary.summarise(report, model)
  return report | {"targets": gpu._summary.targets(report)}


def test_targets_are_judged_by_what_was_measured(report):
  met = [target["met"] for target in report["targets"]]
  assert met == [True, True, True, True, True]
  speed, share, fp8, torch, memory = (target["figure"] for target in report["targets"])
  assert speed == pytest.approx(4.0)
  assert share == pytest.approx(40e12 / 0.1 / 800e12)
  assert fp8 == pytest.approx(1.25)
  assert torch == pytest.approx(1.2)
  assert memory == pytest.approx(5.5 / 10)


def test_fp8_is_measured_against_the_peaks_of_what_its_products_are(report):
  found = report["models"]["gpt-124m"]["rows"]["fp8, current"]["share_of_peak"]
  assert found == pytest.approx((20e12 / 1600e12 + 20e12 / 800e12) / 0.08)


def test_tables_and_pictures_are_made_of_the_report_alone(report):
  text = gpu.tables(report)
  assert "| bf16 | 100.0 (95.0 to 105.0) | 1.000 | 81920 | 50% | 7.5 | 5.5 | 0.55 |" in text
  assert "| bf16 at least 3x fp32, GPT-124M | bf16 4.00 | met |" in text
  assert "Not measured: GPT, torch, fp16: no time left" in text
  assert text.endswith("`python scripts/bench.py gpu` on a GPU; jax 1.")
  pytest.importorskip("matplotlib")
  assert {*gpu.pictures(report)} == {"gpu_step_time", "gpu_share_of_peak"}


def test_what_is_not_measured_is_neither_met_nor_missed(report):
  for model in report["models"].values():
    model["rows"] = {"bf16": {"error": "no memory"}}
  assert [target["met"] for target in gpu._summary.targets(report)] == [None] * 5


def test_rows_that_met_are_compared_round_by_round():
  reference = row(1.0, "bfloat16") | {
    "rounds_s": [1.0, 2.0, 4.0, 8.0],
    "groups": {"first.0": 0, "first.1": 2},
  }
  later = row(1.0, "bfloat16") | {"rounds_s": [8.0, 8.0], "groups": {"first.1": 0}}
  assert paired(later, reference) == [2.0, 1.0]
  elsewhere = row(6.0, "bfloat16", group="again.0")
  assert paired(elsewhere, reference) == [2.0]


def test_groups_fit_the_device_and_have_the_reference():
  size = {"reference": 16, "torch": 30, "a": 16, "b": 16, "huge": 52}
  stage = Stage(None, None, "", 0, 0, 1, 1, 1, memory=80 << 30, reference="reference")
  stage.rows = {name: {"step_bytes": gigabytes * (1 << 30)} for name, gigabytes in size.items()}
  stage.rows["torch"] |= {"torch": "2", "held_bytes": 30 << 30}
  groups = stage.groups(["a", "b", "huge", "reference", "torch"], dict.fromkeys(size))
  assert groups == [["reference", "torch"], ["reference", "a", "b"], ["huge"]]


@pytest.mark.slow
def test_processes_train_and_take_turns(tmp_path):
  import argparse

  parser = argparse.ArgumentParser()
  gpu.add_arguments(parser)
  rows = [flag for name in ("bf16", gpu._rows.REFERENCE) for flag in ("--policy", name)]
  options = parser.parse_args(
    ["--size", "tiny", "--model", "gpt-124m", "--compiling", "2", "--rounds", "2", *rows]
  )
  options.json = tmp_path / "report.json"
  report = gpu.run(options)
  measured = report["models"]["gpt-124m"]["rows"]
  assert [len(measured[name]["rounds_s"]) for name in ("bf16", gpu._rows.REFERENCE)] == [2, 2]
  assert measured["bf16"]["first_loss"] == pytest.approx(
    measured[gpu._rows.REFERENCE]["first_loss"], rel=0.01
  )
  assert options.json.exists()


def test_without_a_gpu_it_ends_at_once_and_says_why(monkeypatch):
  import argparse

  parser = argparse.ArgumentParser()
  gpu.add_arguments(parser)

  class Said:
    read = lambda self, timeout: {"platform": "cpu", "device": "1 x cpu"}
    close = lambda self: None

  monkeypatch.setattr(gpu.Suite, "worker", lambda self, task: Said())
  monkeypatch.setattr(gpu, "_figures", lambda model: {})
  with pytest.raises(SystemExit, match="needs a GPU, and JAX finds 1 x cpu here"):
    gpu.run(parser.parse_args([]))


@pytest.mark.parametrize(("name", "precision"), [("float32", "HIGHEST"), ("tensorfloat32", "HIGH")])
def test_a_peak_is_of_the_precision_that_it_is_named_after(name, precision):
  lhs, rhs, out, asked = PEAKS[name]
  product = square_product(out, asked)
  text = product.lower(jnp.zeros((8, 8), lhs), jnp.zeros((8, 8), rhs)).as_text()
  assert f"precision = [{precision}, {precision}]" in text
