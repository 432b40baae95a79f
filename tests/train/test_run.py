"""`scripts/train.py` as a user meets it: run directories, resume, interruption, exit statuses."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from mpjax.cli import main
from tests._quick_compile import environment as quick_environment
from tests.train._tiny_gpt import records, write_tiny_gpt

ROOT = pathlib.Path(__file__).parents[2]
OVERFLOWING = "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 5}}"


def curve(directory):
  """What has to be the same, bit for bit, however often a run was interrupted."""
  return [
    (r["step"], r["loss"], r["loss_scale"], r["skipped_steps"], r.get("eval_loss"))
    for r in records(directory)
  ]


def command(arguments, **environment):
  env = {**os.environ, "JAX_PLATFORMS": "cpu", **quick_environment(devices=1), **environment}
  line = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments]
  return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, directory, step):
  deadline = time.monotonic() + 120
  file = directory / "metrics.jsonl"
  while not (file.exists() and f'"step": {step},' in file.read_text()):
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """The arguments and the directory of a run that no test may change."""
  folder = tmp_path_factory.mktemp("finished")
  arguments = [*write_tiny_gpt(folder), "policy=bf16", f"out={folder / 'run'}"]
  assert main(["train", *arguments]) == 0
  return arguments, folder / "run"


@pytest.mark.slow
def test_a_run_leaves_what_the_contract_names(finished):
  _, out = finished
  lines = records(out)
  assert [line["step"] for line in lines] == list(range(1, 21))
  keys = {"step", "loss", "loss_scale", "skipped_steps", "grads_finite", "step_time_s"}
  assert all(keys <= line.keys() for line in lines)
  assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20]
  # Also beside an evaluation, where the host learns of several steps at once; and without compiling.
  rate = next(key for key in lines[0] if key.endswith("_per_s"))
  assert lines[-1]["step_time_s"] > 1e-3 * lines[8]["step_time_s"]
  assert lines[-1]["step_time_s"] < lines[0]["step_time_s"] / 10
  assert all(
    line["step_time_s"] * line[rate] == pytest.approx(lines[0]["step_time_s"] * lines[0][rate])
    for line in lines
  )
  summary = json.loads((out / "summary.json").read_text())
  assert {
    "final_loss",
    "eval_loss",
    "steps",
    "skipped_steps",
    "policy",
    "backend",
    "steps_per_s",
  } <= summary.keys()
  assert summary["steps"] == 20
  assert summary["policy"] == "bf16"
  assert summary["backend"] == "cpu"
  assert summary["final_loss"] == lines[-1]["loss"] < lines[0]["loss"]
  assert summary["peak_memory_bytes"] > 1e6
  resolved = yaml.safe_load((out / "config.yaml").read_text())
  assert resolved["policy"]["compute_dtype"] == "bfloat16"
  assert resolved["train"]["keep_checkpoints"] == 2


@pytest.mark.slow
def test_the_last_checkpoints_and_the_best_are_kept(finished):
  _, out = finished
  steps = sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdecimal())
  best = min((line["eval_loss"], line["step"]) for line in records(out) if "eval_loss" in line)[1]
  assert steps == sorted({16, 20, best})


def test_tensorboard_reads_the_events(finished):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  _, out = finished
  events = EventAccumulator(str(out / "tensorboard"))
  events.Reload()
  assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
  assert [event.step for event in events.Scalars("eval_loss")] == [10, 20]


def test_a_finished_run_is_shown_again_and_left_alone(finished, capsys):
  arguments, out = finished
  before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != ".lock"}
  assert main(["train", *arguments]) == 0
  assert "finished already" in capsys.readouterr().out
  assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_directory_of_another_config_is_refused_and_left_alone(finished, capsys):
  arguments, out = finished
  before = (out / "config.yaml").read_bytes(), (out / "metrics.jsonl").read_bytes()
  assert main(["train", *arguments, "optimizer.learning_rate=0.5"]) == 2
  error = capsys.readouterr().err
  assert "optimizer.learning_rate: 0.01 there, 0.5 here" in error
  assert error.count("\n") == 1
  assert before == ((out / "config.yaml").read_bytes(), (out / "metrics.jsonl").read_bytes())


def test_an_out_that_cannot_be_a_directory_is_refused(tiny_gpt, tmp_path, capsys):
  (tmp_path / "file").write_text("x")
  for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/here", tmp_path / ("x" * 300)):
    assert main(["train", *tiny_gpt, f"out={out}"]) == 2
    error = capsys.readouterr().err
    assert f"out={out}" in error
    assert error.count("\n") == 1


def test_a_directory_with_other_things_in_it_is_refused(tiny_gpt, tmp_path, capsys):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("x")
  assert main(["train", *tiny_gpt, f"out={tmp_path / 'mine'}"]) == 2
  assert "not a run directory" in capsys.readouterr().err
  assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


# Overflows, skips and regrows; dropout and accumulation are in play too.
INTERRUPTED = [
  OVERFLOWING,
  "train.accumulate=2",
  "train.steps=150",
  "train.eval_every=50",
  "train.checkpoint_every=10",
]
SIGNALS = [
  (signal.SIGKILL, 3),  # before the first checkpoint
  (signal.SIGTERM, 37),
  (signal.SIGKILL, 80),
  (signal.SIGINT, 110),
]


def last_step(directory):
  file = directory / "metrics.jsonl"
  return max(map(int, re.findall(r'"step": (\d+),', file.read_text())), default=0) if file.exists() else 0


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(tiny_gpt, tmp_path):
  arguments, out = [*tiny_gpt, *INTERRUPTED], tmp_path / "run"
  process = command([*arguments, f"out={tmp_path / 'uninterrupted'}"])
  _, error = process.communicate()
  assert process.returncode == 0, error
  for kind, kill_at in SIGNALS:
    last = last_step(out)
    process = command([*arguments, f"out={out}"])
    # Until it resumes there are the records of the run before, which may have gone on for a while.
    wait_for_step(process, out, max(kill_at, last + 1))
    process.send_signal(kind)
    _, error = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[kind], error
    assert not (out / "summary.json").exists()
    if kind != signal.SIGKILL:
      step = int(re.search(r"checkpoint of step (\d+) saved", error)[1])
      assert (out / "checkpoints" / str(step)).exists()
      assert records(out)[-1]["step"] == step
  process = command([*arguments, f"out={out}"])
  shown, error = process.communicate()
  assert process.returncode == 0, error
  assert "resumed after step" in shown
  expected = curve(tmp_path / "uninterrupted")
  assert curve(out) == expected
  assert expected[-1][3] > 0  # steps were skipped
  ours, summary = (json.loads((d / "summary.json").read_text()) for d in (out, tmp_path / "uninterrupted"))
  assert (ours["eval_loss"], ours["final_loss"]) == (summary["eval_loss"], summary["final_loss"])


@pytest.mark.slow
def test_two_processes_cannot_run_in_one_directory(tiny_gpt, tmp_path):
  arguments = [*tiny_gpt, "train.steps=2000", f"out={tmp_path / 'run'}"]
  first = command(arguments)
  wait_for_step(first, tmp_path / "run", 1)
  second = command(arguments)
  _, error = second.communicate()
  first.kill()
  first.communicate()
  assert second.returncode == 2
  assert "another process" in error


@pytest.mark.slow
def test_a_run_stuck_at_the_lowest_scale_stops_and_says_why(tiny_gpt, tmp_path, capsys):
  policy = "policy={base: fp16, loss_scaling: {init_scale: 16777216, min_scale: 8388608}}"
  out = tmp_path / "run"
  arguments = [*tiny_gpt, policy, "train.max_skips=5", "train.steps=200", f"out={out}"]
  assert main(["train", *arguments]) == 3
  error = capsys.readouterr().err
  assert "stopped at step 5" in error
  assert "up to which steps were under way, and the batch of step 5" in error
  assert re.search(r"non-finite gradients: \S+ \(\d+ (NaN|\+inf|-inf)", error)
  assert "policy=bf16" in error
  assert "min_scale" in error
  batch = np.load(out / "nonfinite_batch_5.npz")
  assert batch["tokens"].shape == (8, 17)
  # Nothing was learnt and nothing lost: the same command stops again, from the saved state.
  assert main(["train", *arguments]) == 3


@pytest.mark.slow
def test_data_that_turns_bad_stops_a_bfloat16_run_too(tmp_path, capsys, monkeypatch):
  from mpjax.train.data import Data

  good = Data.train

  def bad(self, *rows):
    class Iterator:
      def __init__(self, inner):
        self.inner, self.get_state, self.set_state = inner, inner.get_state, inner.set_state

      def __next__(self):
        batch = next(self.inner)
        batch["images"][3, 2, 1] = np.nan
        return batch

    return Iterator(good(self, *rows))

  monkeypatch.setattr(Data, "train", bad)
  config = str(ROOT / "configs" / "vit_digits.yaml")
  options = ["policy=bf16", "model.layers=1", "train.max_skips=4", "mesh.data=1", f"out={tmp_path / 'run'}"]
  assert main(["train", config, *options]) == 3
  error = capsys.readouterr().err
  assert "non-finite batch: images (1 NaN of" in error
  assert "mend the data" in error


@pytest.mark.parametrize(
  ("overrides", "words"),
  [
    (["policy=fp61"], ["fp61", "fp16"]),
    (["data.path=/nowhere/at/all"], ["/nowhere/at/all", "no such file"]),
    (["data.seq_len=100000"], ["seq_len=100000", "longer than"]),
    (["data.batch_size=100000"], ["batch_size=100000", "rows"]),
    (["mesh.data=64"], ["mesh.data=64", "8 devices"]),
    (["mesh.data=8", "train.accumulate=2"], ["batch_size=8", "8 devices"]),
    (["model={kind: vit}"], ["vit", "tokens", "num_classes"]),
    (["model.heads=3"], ["dim=32", "heads=3"]),
    (["optimizer.name=adamv"], ["adamv", "did you mean"]),
    (["optimizer.options={b1: often}"], ["optimizer.options", "often"]),
    (["model.attention=cudnn", "policy=bf16_pure"], ["model.attention=cudnn", "cpu", "auto"]),
    (["model.attention=cudnn", "policy=bf16"], ["model.attention=cudnn", "on cpu", "auto"]),
    (["policy={base: bf16, overrides: {heat: fp32}}"], ["'heat' matches no module", "GPT/blocks/0"]),
  ],
)
def test_bad_input_is_one_line_and_status_2_and_leaves_nothing(tiny_gpt, tmp_path, capsys, overrides, words):
  assert main(["train", *tiny_gpt, f"out={tmp_path / 'run'}", *overrides]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1
  assert all(word in error for word in words), error
  assert not (tmp_path / "run").exists()


def test_explain_says_what_a_run_would_do(tiny_gpt, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  assert main(["explain", *tiny_gpt, "policy={base: bf16, overrides: {blocks/1: fp32}}"]) == 0
  lines = capsys.readouterr().out.splitlines()
  row = lambda path: next(line.split() for line in lines if line.split()[:1] == [path])
  assert row("GPT/blocks/0/up")[-1] == "bfloat16"
  assert row("GPT/blocks/1/up")[-1] == "float32"
  assert "its module's policy computes in float32" in "\n".join(lines)
  assert main(["explain", *tiny_gpt, "policy={base: bf16, autocast: false}"]) == 0
  assert "casts parameters and batch instead" in capsys.readouterr().out
  assert main(["explain", *tiny_gpt, "policy=fp61"]) == 2


@pytest.mark.slow
def test_eight_devices_train_as_one_does(tiny_gpt, tmp_path):
  options = ["policy=fp32", "train.steps=5", "model.dropout=0"]
  for devices in (1, 8):
    out = tmp_path / str(devices)
    assert main(["train", *tiny_gpt, *options, f"mesh.data={devices}", f"out={out}"]) == 0
  one, eight = ([r["loss"] for r in records(tmp_path / d)] for d in ("1", "8"))
  np.testing.assert_allclose(one, eight, rtol=1e-4)
