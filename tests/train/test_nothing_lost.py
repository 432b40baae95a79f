"""Runs through what a month of use brings: damaged metrics, lost terminals, moved directories, strange checkpoints."""

import errno
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from mpjax.cli import main
from mpjax.train import ConfigError, parse_config
from mpjax.train._display import Display
from mpjax.train._output import Output
from mpjax.train.monitors import Events, MetricsFile, RunDirectory
from mpjax.train.multiprocess import Interrupt, code_mismatch
from tests._quick_compile import environment as quick_environment
from tests.train._tiny_gpt import records, write_tiny_gpt

ROOT = pathlib.Path(__file__).parents[2]
# Orbax drops what was under way where its folder is gone: Python says so whenever it collects that.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SHORT = ["policy=bf16", "train.steps=12", "train.eval_every=12", "train.checkpoint_every=4"]


def line(step):
  return json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n"


@pytest.mark.parametrize(
  ("content", "kept", "said"),
  [
    (b"".join(map(line, range(1, 7))), [1, 2, 3, 4], []),
    (line(1) + b"\n" + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 2 is no record"]),
    (
      line(1) + b"a note\n" + line(2) + b"[1]\n" + line(3) + line(4),
      [1, 2, 3, 4],
      ["lines 2, 4 are no records"],
    ),
    (line(1) + line(2) + b"\xff" + line(3) + line(4), [1, 2, 4], ["line 3 is no", "1 of 4 records"]),
    (line(1) + b'{"step": true}\n' + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 2 is no record"]),
    (line(1) + line(2) + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 3 repeats a step"]),
    (b"[" * 100_000 + b"\n" + line(1) + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 1 is no record"]),
    (line(1) + line(2) + line(3) + line(4)[:-1], [1, 2, 3, 4], []),
    (line(1) + line(2) + line(3) + line(4) + line(5)[:9], [1, 2, 3, 4], []),
    (line(1) + line(2), [1, 2], ["2 of 4 records up to step 4 are missing", "step 2 is the last"]),
    (b"", [], ["4 of 4 records up to step 4 are missing"]),
  ],
)
def test_every_readable_record_is_kept_and_the_rest_is_told(tmp_path, content, kept, said):
  file = tmp_path / "metrics.jsonl"
  file.write_bytes(content)
  metrics = MetricsFile(file, resume_step=4, expected=4)
  metrics.write({"step": 5})
  metrics.sync()
  metrics.close()
  assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [*kept, 5]
  assert all(word in " ".join(metrics.said) for word in said)
  assert bool(metrics.said) == bool(said)
  assert metrics.count == len(kept) + 1
  has_bad = ", and all others are kept" in " ".join(metrics.said)
  assert (tmp_path / "damaged" / "metrics.jsonl").exists() == has_bad
  if has_bad:
    assert (tmp_path / "damaged" / "metrics.jsonl").read_bytes() == content
  again = MetricsFile(file, resume_step=5, expected=metrics.count)
  again.close()
  assert again.said == []


class Broken(io.StringIO):
  """A stream whose reader has gone after some characters."""

  def __init__(self, room):
    super().__init__()
    self.room = room

  def write(self, text):
    if self.tell() + len(text) > self.room:
      raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    return super().write(text)


def test_output_goes_to_the_log_once_nobody_reads(tmp_path, monkeypatch):
  out, err = Broken(8), io.StringIO()
  monkeypatch.setattr(sys, "stdout", out)
  monkeypatch.setattr(sys, "stderr", err)
  with Output() as output:
    output.log_to(tmp_path)
    print("first")
    assert not (tmp_path / "train.log").exists()
    print("second")
    print("\x1b[1mthird\x1b[0m")
    sys.stdout.write("\x1b[2K a frame of a progress bar")
    assert not sys.stdout.isatty()
  assert sys.stdout is out
  assert out.getvalue() == "first\n"
  told, *rest = (tmp_path / "train.log").read_text().splitlines()
  assert told == "stdout cannot be written (Broken pipe): the run goes on, and says the rest in this file"
  assert rest == ["second", "third"]
  assert err.getvalue().count(f"says the rest in {tmp_path / 'train.log'}") == 1


def test_closed_streams_and_a_directory_that_is_known_late(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdout", None)
  monkeypatch.setattr(sys, "stderr", None)
  with Output() as output:
    print("early")
    print("error", file=sys.stderr)
    output.log_to(tmp_path)
  log = (tmp_path / "train.log").read_text()
  assert "stdout cannot be written (closed)" in log
  assert "early\n" in log
  assert "error\n" in log


@pytest.mark.parametrize("encoding", ["ascii", "cp1251"])
def test_a_character_that_a_terminal_has_not_is_shown_as_its_code(encoding, tmp_path, monkeypatch):
  raw = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
  with Output() as output:
    output.log_to(tmp_path)
    print("runs/é")
  assert raw.getvalue() == rb"runs/\xe9" + os.linesep.encode()
  assert not (tmp_path / "train.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["{} 2>err | head -1", "{} >/dev/full 2>err", "{} >&- 2>&-"])
def test_a_run_outlives_its_output(tmp_path, shell):
  arguments = [*write_tiny_gpt(tmp_path), *SHORT, f"out={tmp_path / 'run'}"]
  command = " ".join([sys.executable, "-m", "mpjax", "train", *arguments])
  environment = os.environ | quick_environment(devices=1) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  script = f"set -o pipefail; {shell.format(command)}"
  done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert len(records(tmp_path / "run")) == 12
  assert "stdout cannot be written" in (tmp_path / "run" / "train.log").read_text()
  if (tmp_path / "err").exists():
    assert (tmp_path / "err").read_text().count("\n") == 1


@pytest.fixture
def disturbed(tmp_path, monkeypatch):
  """(function that is called after step 6, arguments of the run): by default nothing happens."""
  arguments = [*write_tiny_gpt(tmp_path), *SHORT]
  happens = []
  shown = Display.step

  def step(self, number, record, logged):
    shown(self, number, record, logged)
    if number == 6 and happens:
      happens.pop()()

  monkeypatch.setattr(Display, "step", step)
  return happens, arguments


def curve(directory):
  return [(record["step"], record["loss"]) for record in records(directory)]


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["moved", "deleted", "replaced", "moved and replaced"])
def test_a_run_directory_that_is_gone_ends_the_run_with_a_checkpoint(disturbed, tmp_path, capsys, fate):
  happens, arguments = disturbed
  arguments.append("train.checkpoint_wait=true")  # what is being written would be in the old place
  run, other = tmp_path / "run", tmp_path / "other"
  assert main(["train", *arguments, f"out={tmp_path / 'alone'}"]) == 0

  def happen():
    run.rename(other) if "moved" in fate else shutil.rmtree(run)
    if "replaced" in fate:
      run.mkdir()
      (run / "mine").write_text("x")

  happens.append(happen)
  assert main(["train", *arguments, f"out={run}"]) == 4
  error = capsys.readouterr().err
  refuge = other if "moved" in fate else tmp_path / "run.1" if fate == "replaced" else run
  assert error.count("\n") == 1
  assert f"{run} was moved, deleted or replaced" in error
  assert f"the same command with out={refuge} resumes" in error
  if "replaced" in fate:
    assert [path.name for path in run.iterdir()] == ["mine"]
  assert main(["train", *arguments, f"out={refuge}"]) == 0
  told = capsys.readouterr().out
  whole = curve(tmp_path / "alone")
  if "moved" in fate:
    assert curve(refuge) == whole
  else:
    assert "records up to step" in told
    assert curve(refuge) == whole[-len(curve(refuge)) :]
    assert len(curve(refuge)) >= 4


@pytest.mark.slow
def test_a_checkpoint_of_another_step_or_run_is_set_aside(disturbed, tmp_path, capsys):
  _, arguments = disturbed
  runs = {name: tmp_path / name for name in ("alone", "renamed", "copied", "foreign", "other")}
  for name in ("alone", "other"):
    rate = ["optimizer.learning_rate=0.5"] if name == "other" else []
    assert main(["train", *arguments, *rate, f"out={runs[name]}"]) == 0
  for name in ("renamed", "copied", "foreign"):
    shutil.copytree(runs["alone"], runs[name])
    (runs[name] / "summary.json").unlink()
  shutil.rmtree(runs["renamed"] / "checkpoints" / "12")
  (runs["renamed"] / "checkpoints" / "8").rename(runs["renamed"] / "checkpoints" / "11")
  shutil.copytree(runs["copied"] / "checkpoints" / "8", runs["copied"] / "checkpoints" / "1000")
  shutil.rmtree(runs["foreign"] / "checkpoints" / "12")
  shutil.copytree(runs["other"] / "checkpoints" / "12", runs["foreign"] / "checkpoints" / "12")
  capsys.readouterr()
  for name, words in {
    "copied": "step 1000 is damaged: it is of step 8; moved to",
    "foreign": "it is of another run (optimizer.learning_rate: 0.5 there, 0.01 here), for which there is train.init_from",
  }.items():
    assert main(["train", *arguments, f"out={runs[name]}"]) == 0
    assert words in capsys.readouterr().out
    assert curve(runs[name]) == curve(runs["alone"])
  assert main(["train", *arguments, f"out={runs['renamed']}"]) == 4  # there is no other one
  assert "step 11 is damaged: it is of step 8" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"steps": 3}', "3", "[1", "[" * 100_000, "\0"])
def test_a_summary_that_is_none_is_no_end_of_a_run(tmp_path, text):
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  (tmp_path / "run" / "summary.json").write_text(text)
  directory = RunDirectory(config)
  assert directory.summary() is None
  directory.close()
  assert "is not the summary of a run" in directory.said[0]
  assert (tmp_path / "run" / "damaged" / "summary.json").read_text() == text


def test_a_summary_that_cannot_be_set_aside_is_an_error_of_one_line(tmp_path):
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  (tmp_path / "run" / "summary.json").write_text("{}")
  directory = RunDirectory(config)
  (tmp_path / "run" / "damaged").write_text("no folder")
  with pytest.raises(ConfigError, match=r"summary.json: cannot be read or moved \("):
    directory.summary()
  directory.close()


def test_a_start_that_was_over_before_it_had_a_config_leaves_a_directory_to_start_in(tmp_path, monkeypatch):
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})

  def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
      RunDirectory(config)
  assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
  (tmp_path / "run" / "config.yaml.tmp").write_text("polic")  # as a kill leaves it
  RunDirectory(config).close()
  assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.yaml"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints", "tensorboard"])
def test_an_entry_of_the_wrong_kind_is_refused(tmp_path, name, capsys):
  arguments = [*write_tiny_gpt(tmp_path), f"out={tmp_path / 'run'}"]
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  entry = tmp_path / "run" / name
  entry.mkdir() if "." in name else entry.write_text("x")
  assert main(["train", *arguments]) == 2
  assert f"{name} in it is" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_without_tensorboard(disturbed, tmp_path, capsys, monkeypatch):
  happens, arguments = disturbed

  def broken(self, event):
    raise OverflowError("timestamp too large")

  from tensorboard.summary.writer.record_writer import RecordWriter

  happens.append(lambda: monkeypatch.setattr(RecordWriter, "write", broken))
  assert main(["train", *arguments, f"out={tmp_path / 'run'}"]) == 0
  assert capsys.readouterr().out.count("the run goes on without TensorBoard's file: OverflowError") == 1
  assert len(records(tmp_path / "run")) == 12


def test_events_that_a_full_disk_refuses_are_an_error(tmp_path, monkeypatch):
  from tensorboard.summary.writer.record_writer import RecordWriter

  def full(self, event):
    raise OSError(errno.ENOSPC, "No space left on device")

  events = Events(tmp_path, 0)
  monkeypatch.setattr(RecordWriter, "write", full)
  with pytest.raises(OSError, match="No space"):
    events.add_scalar("loss", 1.0, 1)
  events.close()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_hangs_up_is_an_interruption_unless_it_is_ignored(ignored):
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
  try:
    with Interrupt() as interrupt:
      signal.raise_signal(signal.SIGHUP)
    assert interrupt.signum == (None if ignored else signal.SIGHUP)
  finally:
    signal.signal(signal.SIGHUP, before)


def test_what_differs_between_the_code_of_processes_is_named():
  assert code_mismatch({"jax": "1"}, {"jax": "1"}, 3) is None
  text = code_mismatch({"jax": "1", "own": "a"}, {"jax": "2", "own": "a"}, 3)
  assert "jax: 1 in process 0, 2 in process 3" in text
  assert "own" not in text
