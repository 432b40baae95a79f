"""`mpjax train` as a user meets it: run directories, resume, interruption, exit statuses."""

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

from mpjax.cli import _train_command, main
from mpjax.train import Interrupted

# The command's own, without a run.
from mpjax.train._errors import Interrupt
from mpjax.train.loop import _run
from tests._quick_compile import environment as quick_environment
from tests.train import _runs
from tests.train._runs import curve, interrupt, last_step, refused, train, train_until_killed, write_line
from tests.train._tiny_gpt import records, write_tiny_gpt

ROOT = pathlib.Path(__file__).parents[2]
# Overflows, skips and regrows; dropout and accumulation are in play too.
INTERRUPTED = [
  "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 5}}",
  "train.accumulate=2",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """The arguments and the directory of a run that no test may change."""
  folder = tmp_path_factory.mktemp("finished")
  arguments = [*write_line(folder), "policy=bf16", f"out={folder / 'run'}"]
  assert main(["train", *arguments]) == 0
  return arguments, folder / "run"


def test_a_run_leaves_what_the_contract_names(finished):
  _, out = finished
  lines = records(out)
  assert [line["step"] for line in lines] == list(range(1, 21))
  keys = {"step", "loss", "loss_scale", "skipped_steps", "grads_finite", "step_time_s"}
  assert all(keys <= line.keys() for line in lines)
  assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20]
  # Also beside an evaluation, where the host learns of several steps at once. The first step was compiled.
  assert lines[0]["step_time_s"] is lines[0]["rows_per_s"] is None
  assert all(line["step_time_s"] * line["rows_per_s"] == pytest.approx(16) for line in lines[1:])
  summary = json.loads((out / "summary.json").read_text())
  expected = {"steps": 20, "skipped_steps": 0, "policy": "bf16", "backend": "cpu", "parameters": 5}
  assert summary.items() >= expected.items()
  assert summary["final_loss"] == lines[-1]["loss"] < lines[0]["loss"]
  assert summary["eval_loss"] == lines[-1]["eval_loss"]
  assert summary["best_eval_loss"] == min(line["eval_loss"] for line in lines if "eval_loss" in line)
  assert summary["peak_memory_bytes"] > 1e6
  assert summary["steps_per_s"] > 0
  resolved = yaml.safe_load((out / "config.yaml").read_text())
  assert resolved["policy"]["compute_dtype"] == "bfloat16"
  assert resolved["train"]["keep_checkpoints"] == 2


def test_the_last_checkpoints_and_the_best_are_kept(finished):
  _, out = finished
  steps = sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdecimal())
  best = min((line["eval_loss"], line["step"]) for line in records(out) if "eval_loss" in line)[1]
  assert steps == sorted({16, 20, best})


def test_tensorboard_reads_the_events(finished):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  events = EventAccumulator(str(finished[1] / "tensorboard"))
  events.Reload()
  assert {"learning_rate", "grad_norm", "loss"} <= set(events.Tags()["scalars"])
  assert "loss_scale" not in events.Tags()["scalars"]
  assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
  assert [event.step for event in events.Scalars("eval_loss")] == [10, 20]


def test_a_finished_run_is_shown_again_and_left_alone(finished, capsys):
  arguments, out = finished
  times = lambda: {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != ".lock"}
  before = times()
  assert main(["train", *arguments]) == 0
  shown = capsys.readouterr().out
  assert all(word in shown for word in ("finished already", "learning rate", "grad norm"))
  assert "scale" not in shown
  assert main(["train", *arguments, "train.export=safetensors"]) == 0
  assert f"not exported: mpjax export {out} does that" in capsys.readouterr().out.replace("\n", " ")
  other = [*arguments, "optimizer.learning_rate=0.5"]
  refused(["train", *other], ["optimizer.learning_rate: 0.1 there, 0.5 here"], capsys)
  assert times() == before


def test_an_out_that_is_no_directory_of_a_run_is_refused(tmp_path, capsys):
  arguments = write_line(tmp_path)
  (tmp_path / "file").write_text("x")
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("x")
  for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/here", tmp_path / ("x" * 300)):
    refused(["train", *arguments, f"out={out}"], [f"out={out}"], capsys)
  refused(["train", *arguments, f"out={tmp_path / 'mine'}"], ["not a run directory"], capsys)
  assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_killed_and_interrupted_run_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
  """In one process, that another does as much for: processes are killed by the slow test below."""
  arguments, out = [*write_tiny_gpt(tmp_path, layers=1), *INTERRUPTED], tmp_path / "run"
  train(arguments, tmp_path / "whole")
  command = ["train", *arguments, f"out={out}"]
  train_until_killed(arguments, out, 3)
  for signum, name, taken, step in ((signal.SIGTERM, "SIGTERM", 7, 7), (signal.SIGINT, "Ctrl-C", 3, 10)):
    with monkeypatch.context() as patch:
      interrupt(patch, taken, lambda signum=signum: signal.raise_signal(signum))
      assert main(command) == 128 + signum
    shown = capsys.readouterr().err
    assert shown == f"{name}: checkpoint of step {step} saved in {out}; the same command resumes from it\n"
    assert records(out)[-1]["step"] == step
    assert not (out / "summary.json").exists()
  assert main(command) == 0
  assert "resumed after step 10" in capsys.readouterr().out
  expected = curve(tmp_path / "whole")
  assert curve(out) == expected
  assert 0 < expected[-1][3] < 19  # steps were skipped
  summaries = [json.loads((d / "summary.json").read_text()) for d in (out, tmp_path / "whole")]
  for key in ("eval_loss", "final_loss", "skipped_steps", "best_eval_loss"):
    assert summaries[0][key] == summaries[1][key]
  _runs.assert_same_bits(_runs.state_of(out), _runs.state_of(tmp_path / "whole"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_is_not_lost(tmp_path, monkeypatch, capsys, signum):
  class Destructor:
    def __del__(self):  # Python drops what is raised here
      signal.raise_signal(signum)

  monkeypatch.setattr(_run, "load_plugins", lambda plugins: Destructor())
  monkeypatch.setattr(_train_command, "load_plugins", lambda plugins: Destructor())
  name = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
  arguments, out = write_line(tmp_path), tmp_path / "run"
  assert main(["train", *arguments, f"out={out}"]) == 128 + signum
  assert capsys.readouterr().err == f"{name}: stopped before the first step\n"
  with pytest.raises(Interrupted) as raised:
    _run.run(arguments[0], [*arguments[1:], f"out={out}"])
  assert raised.value.signum == signum
  assert not out.exists()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_hangs_up_is_an_interruption_unless_it_is_ignored(ignored):
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
  try:
    with Interrupt() as interrupt:
      signal.raise_signal(signal.SIGHUP)
    assert interrupt.signum == (None if ignored else signal.SIGHUP)
  finally:
    signal.signal(signal.SIGHUP, before)


def command(arguments, **environment):
  env = {**os.environ, "JAX_PLATFORMS": "cpu", **quick_environment(devices=1), **environment}
  line = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments]
  return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_are_killed_resume_bit_for_bit(tmp_path):
  often = ["train.steps=150", "train.eval_every=50", "train.checkpoint_every=10"]
  arguments, out = [*write_tiny_gpt(tmp_path), *INTERRUPTED, *often], tmp_path / "run"
  process = command([*arguments, f"out={tmp_path / 'uninterrupted'}"])
  _, error = process.communicate()
  assert process.returncode == 0, error
  for kind, kill_at in ((signal.SIGKILL, 3), (signal.SIGTERM, 37), (signal.SIGKILL, 80)):
    last, deadline = last_step(out), time.monotonic() + 120
    process = command([*arguments, f"out={out}"])
    # Until it resumes there are the records of the run before, which may have gone on for a while.
    while last_step(out) < max(kill_at, last + 1):
      assert process.poll() is None, process.communicate()
      assert time.monotonic() < deadline
      time.sleep(0.01)
    process.send_signal(kind)
    _, error = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[kind], error
    assert not (out / "summary.json").exists()
  process = command([*arguments, f"out={out}"])
  shown, error = process.communicate()
  assert process.returncode == 0, error
  assert "resumed after step" in shown
  assert curve(out) == curve(tmp_path / "uninterrupted")


def test_a_run_stuck_at_the_lowest_scale_stops_and_says_why(tmp_path, capsys):
  policy = "policy={base: fp16, loss_scaling: {init_scale: 16777216, min_scale: 8388608}}"
  out = tmp_path / "run"
  command = ["train", *write_line(tmp_path), policy, "train.max_skips=5", f"out={out}"]
  assert main(command) == 3
  error = capsys.readouterr().err
  assert "stopped at step 5" in error
  assert "up to which steps were under way, and the batch of step 5" in error
  assert re.search(r"overflowed in float16, (back|for)ward pass", error)
  assert re.search(r"non-finite: (the loss and )?\d of 2 gradients \(", error)
  assert "policy: bf16" in error
  assert "min_scale" in error
  assert np.load(out / "nonfinite_batch_5.npz")["x"].shape == (16, 4)
  # Nothing was learnt and nothing lost: the same command stops again, from the saved state.
  assert main(command) == 3


def test_data_that_turns_bad_stops_a_bfloat16_run_too(tmp_path, capsys):
  options = ["policy=bf16", "data.bad=0", "train.max_skips=4", f"out={tmp_path / 'run'}"]
  assert main(["train", *write_line(tmp_path), *options]) == 3
  error = capsys.readouterr().err
  assert "stopped at step 4: the last 4 steps had non-finite gradients" in error
  assert "batch['y'] holds 16 NaN of 16" in error
  assert "fix the data" in error


def test_bad_input_is_one_line_and_status_2_and_leaves_nothing(tiny_gpt, tmp_path, capsys):
  for overrides, words in [
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
    (["policy={base: bf16, overrides: {heat: fp32}}"], ["'heat' matches no module", "GPT/blocks/0"]),
    # Flags of a run of several processes.
    (["--coordinator", "10.0.0.1:1234"], ["expected --coordinator HOST:PORT", "together"]),
    (["--coordinator", "10.0.0.1", "--num-processes", "2", "--process-id", "0"], ["HOST:PORT", "together"]),
    (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], ["from 0 to N - 1"]),
  ]:
    refused(["train", *tiny_gpt, f"out={tmp_path / 'run'}", *overrides], words, capsys)
    assert not (tmp_path / "run").exists(), overrides
