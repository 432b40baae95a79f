"""Runs through what a month of use brings: damaged metrics, lost terminals, moved directories, strange checkpoints."""

import contextlib
import errno
import io
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import rich.console
import rich.table

from mpjax.train import ConfigError, DataError, parse_config, register_data
from mpjax.train.data import Data
from mpjax.train.loop._metrics_file import MetricsFile

# The lines of a command, and what a run shows of a step, to disturb it there.
from mpjax.train.loop._output import Output, say_last
from mpjax.train.loop._progress import Progress
from mpjax.train.loop._run_directory import RunDirectory
from mpjax.train.loop._trackers import Trackers
from tests._quick_compile import environment as quick_environment
from tests.train._runs import Points, curve, refused, train, write_line
from tests.train._tiny_gpt import records

ROOT = pathlib.Path(__file__).parents[2]
# Orbax drops what was under way where its folder is gone: Python says so whenever it collects that.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LINES = logging.getLogger("mpjax.train")
SHORT = ["train.steps=12", "train.eval_every=12", "train.checkpoint_every=4"]


def line(step):
  return json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n"


METRICS = [  # content, the steps up to 4 that are kept, what is said
  (b"".join(map(line, range(1, 7))), [1, 2, 3, 4], []),
  (line(1) + b"\n" + line(2) + line(3) + line(4), [1, 2, 3, 4], ["not a record of a new step: line 2;"]),
  (line(1) + b"a note\n" + line(2) + b"[1]\n" + line(3) + line(4), [1, 2, 3, 4], ["line 2, 4;"]),
  (line(1) + line(2) + b"\xff" + line(3) + line(4), [1, 2, 4], ["line 3;", "1 of 4 records"]),
  (line(1) + b'{"step": true}\n' + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 2;"]),
  (line(1) + b'{"step": {}}\n' + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 2;"]),
  (line(1) + line(2) + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 3;"]),
  (b"[" * 100_000 + b"\n" + line(1) + line(2) + line(3) + line(4), [1, 2, 3, 4], ["line 1;"]),
  (line(1) + line(2) + line(3) + line(4)[:-1], [1, 2, 3, 4], []),
  (line(1) + line(2) + line(3) + line(4) + line(5)[:9], [1, 2, 3, 4], []),
  (line(1) + line(2), [1, 2], ["2 of 4 records up to step 4 are missing", "the last is of step 2"]),
  (b"", [], ["4 of 4 records up to step 4 are missing"]),
]


@pytest.fixture
def said(caplog):
  """The lines of the logger."""
  LINES.addHandler(caplog.handler)
  yield caplog
  LINES.removeHandler(caplog.handler)


def test_every_readable_record_is_kept_and_the_rest_is_told(tmp_path, said):
  for i, (content, kept, words) in enumerate(METRICS):
    file = tmp_path / str(i) / "metrics.jsonl"
    file.parent.mkdir()
    file.write_bytes(content)
    metrics = MetricsFile(file, resume_step=4, expected=4)
    metrics.write({"step": 5})
    metrics.sync()
    metrics.close()
    assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [*kept, 5], i
    told = " ".join(said.messages)
    said.clear()
    assert all(word in told for word in words), (i, told)
    assert bool(told) == bool(words), (i, told)
    assert metrics.count == len(kept) + 1, i
    has_bad, aside = "all others are kept" in told, file.parent / "damaged" / "metrics.jsonl"
    assert aside.exists() == has_bad, i
    assert not has_bad or aside.read_bytes() == content, i
    again = MetricsFile(file, resume_step=5, expected=metrics.count)
    again.close()
    assert not said.messages, i


class Broken(io.StringIO):
  """A stream whose reader has gone after some characters."""

  def write(self, text):
    if self.tell() + len(text) > 8:
      raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    return super().write(text)


def test_lines_go_to_the_log_once_nobody_reads(tmp_path, monkeypatch):
  out, err = Broken(), io.StringIO()
  monkeypatch.setattr(sys, "stdout", out)
  monkeypatch.setattr(sys, "stderr", err)
  with Output() as output:
    output.show_on(None, quiet=False)
    output.log_to(tmp_path)
    LINES.info("first")
    assert not (tmp_path / "train.log").exists()
    LINES.info("second")
    LINES.info("third", extra={"shown": rich.table.Table()})
    LINES.error("error: fourth")
    assert sys.stdout is out
  assert out.getvalue() == "first\n"
  told, *rest = (tmp_path / "train.log").read_text().splitlines()
  assert told == "stdout cannot be written (Broken pipe): the run goes on, and writes the rest to this file"
  assert rest == ["second", "third"]
  assert err.getvalue().count(f"writes the rest to {tmp_path / 'train.log'}") == 1
  assert err.getvalue().endswith("\nerror: fourth\n")


def test_closed_streams_and_a_directory_that_is_known_late(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdout", None)
  monkeypatch.setattr(sys, "stderr", None)
  with Output() as output:
    LINES.info("early")
    LINES.error("error")
    output.log_to(tmp_path)
  log = (tmp_path / "train.log").read_text()
  assert log.startswith("stdout cannot be written (closed)")
  assert all(text in log for text in ("early\n", "stderr cannot be written (closed)", "error\n"))


@pytest.mark.parametrize("encoding", ["ascii", "cp1251"])
def test_a_character_that_a_terminal_has_not_is_shown_as_its_code(encoding, tmp_path, monkeypatch):
  raw = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
  with Output() as output:
    output.log_to(tmp_path)
    LINES.info("runs/é")
  assert raw.getvalue() == rb"runs/\xe9" + os.linesep.encode()
  assert not (tmp_path / "train.log").exists()


def test_a_console_of_the_caller_may_break_and_stays_as_it_was(tmp_path):
  file = Broken()
  console = rich.console.Console(file=file, force_terminal=True)
  with Output() as output:
    output.log_to(tmp_path)
    with Progress(output.show_on(console, quiet=False), 10, 0, "rows", has_scale=False) as bar:
      bar.step(1, {"loss": 0.5, "skipped_steps": 0, "rows_per_s": None}, logged=True)
      LINES.info("above the bar")
  assert console.file is file
  told, *rest = (tmp_path / "train.log").read_text().splitlines()
  assert told.startswith("the console cannot be written (Broken pipe)")
  # Frames of the bar are not lines.
  assert rest == ["compiling the training step", "step 1/10  loss 0.5", "above the bar"]


def test_the_logger_takes_handlers_and_levels_of_the_user(tmp_path, capsys, caplog):
  arguments = [*write_line(tmp_path), "train.steps=2"]
  LINES.addHandler(caplog.handler)
  try:
    train(arguments, tmp_path / "a")
    shown = capsys.readouterr().out
    assert {"compiling the training step", f"run directory: {tmp_path / 'a'}"} <= set(caplog.messages)
    assert all(line in shown for line in caplog.messages if not line.startswith("run finished"))
    LINES.setLevel(logging.WARNING)
    train(arguments, tmp_path / "b")
  finally:
    LINES.setLevel(logging.INFO)
    LINES.removeHandler(caplog.handler)
  assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["{} 2>err | head -1", "{} >/dev/full 2>err", "{} >&- 2>&-"])
def test_a_run_outlives_its_output(tiny_gpt, tmp_path, shell):
  arguments = [*tiny_gpt, *SHORT, "policy=bf16", f"out={tmp_path / 'run'}"]
  command = " ".join([sys.executable, "-m", "mpjax", "train", *arguments])
  environment = os.environ | quick_environment(devices=1) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  script = f"set -o pipefail; {shell.format(command)}"
  done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert len(records(tmp_path / "run")) == 12
  assert "stdout cannot be written" in (tmp_path / "run" / "train.log").read_text()
  if (tmp_path / "err").exists():
    assert (tmp_path / "err").read_text().count("\n") == 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """Arguments of a run, and the directory of one that nothing happened to, which no test may change."""
  folder = tmp_path_factory.mktemp("alone")
  arguments = [*write_line(folder), *SHORT]
  train(arguments, folder / "run")
  return arguments, folder / "run"


@pytest.fixture
def happens(monkeypatch):
  """A list of functions, each of which is called once after step 6."""
  waiting, shown = [], Progress.step

  def step(self, number, record, logged):
    shown(self, number, record, logged)
    if number == 6 and waiting:
      waiting.pop()()

  monkeypatch.setattr(Progress, "step", step)
  return waiting


@pytest.mark.parametrize("fate", ["moved", "deleted", "replaced", "moved and replaced"])
def test_a_run_directory_that_is_gone_ends_the_run_with_a_checkpoint(alone, happens, tmp_path, capsys, fate):
  # What is being written would be in the old place.
  arguments = [*alone[0], "train.checkpoint_wait=true"]
  run, other, whole = tmp_path / "run", tmp_path / "other", curve(alone[1])

  def happen():
    run.rename(other) if "moved" in fate else shutil.rmtree(run)
    if "replaced" in fate:
      run.mkdir()
      (run / "mine").write_text("x")

  happens.append(happen)
  refuge = other if "moved" in fate else tmp_path / "run.1" if fate == "replaced" else run
  told = [f"{run} was moved, deleted or replaced", f"the same command with out={refuge} resumes"]
  refused(["train", *arguments, f"out={run}"], told, capsys, status=4)
  if "replaced" in fate:
    assert [path.name for path in run.iterdir()] == ["mine"]
  train(arguments, refuge)
  if "moved" in fate:
    assert curve(refuge) == whole
  else:
    assert "records up to step" in capsys.readouterr().out
    assert curve(refuge) == whole[-len(curve(refuge)) :]
    assert len(curve(refuge)) >= 4


def test_a_checkpoint_of_another_step_or_run_is_set_aside(alone, tmp_path, capsys):
  arguments, whole = alone
  runs = {name: tmp_path / name for name in ("renamed", "copied", "foreign")}
  train(arguments, tmp_path / "other", "optimizer.learning_rate=0.5")
  for run in runs.values():
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
  shutil.rmtree(runs["renamed"] / "checkpoints" / "12")
  (runs["renamed"] / "checkpoints" / "8").rename(runs["renamed"] / "checkpoints" / "11")
  shutil.copytree(runs["copied"] / "checkpoints" / "8", runs["copied"] / "checkpoints" / "1000")
  shutil.rmtree(runs["foreign"] / "checkpoints" / "12")
  shutil.copytree(tmp_path / "other" / "checkpoints" / "12", runs["foreign"] / "checkpoints" / "12")
  capsys.readouterr()
  for name, words in {
    "copied": "step 1000 is damaged: it is of step 8; moved to",
    "foreign": "it is of another run (optimizer.learning_rate: 0.5 there, 0.1 here), for which there is train.init_from",
  }.items():
    train(arguments, runs[name])
    assert words in capsys.readouterr().out
    assert curve(runs[name]) == curve(whole)
  # There is no other one.
  words = ["step 11 is damaged: it is of step 8"]
  refused(["train", *arguments, f"out={runs['renamed']}"], words, capsys, status=4)


def test_a_run_without_its_data_saves_the_steps_so_far(alone, tmp_path, monkeypatch, capsys):
  arguments, out, good = [*alone[0], "train.checkpoint_every=100"], tmp_path / "run", Data.train

  def broken(self, *rows):
    inner = good(self, *rows)

    class Iterator:
      get_state, set_state = inner.get_state, inner.set_state

      def __next__(self):
        if inner.get_state()["next_index"] < 6:
          return next(inner)
        raise FileNotFoundError(2, "No such file or directory", "/data/part-7.bin")

    return Iterator()

  with monkeypatch.context() as patch:
    patch.setattr(Data, "train", broken)
    told = [
      "the data of step 7 cannot be read: /data/part-7.bin: No such file",
      f"the checkpoint of step 6 is in {out}, and the same command resumes from it once the data is back",
    ]
    refused(["train", *arguments, f"out={out}"], told, capsys)
  train(arguments, out)
  assert curve(out) == curve(alone[1])


def test_a_row_that_is_bad_in_the_middle_of_a_run_is_one_line(alone, tmp_path, capsys):
  class Torn(Points):
    def __getitem__(self, index):
      if index == 37:  # which is not looked at before the run
        raise DataError("a.bin: token 5000 is 900: expected less than data.vocab_size=50")
      return super().__getitem__(index)

  register_data("torn")(lambda: (Torn(64, 1000), Points(16, 1000)))
  told = ["the data of step ", "a.bin: token 5000 is 900: expected less than data.vocab_size=50"]
  refused(["train", *alone[0], "data.kind=torn", f"out={tmp_path / 'run'}"], told, capsys)


def test_a_run_goes_on_without_tensorboard(alone, happens, tmp_path, capsys, monkeypatch):
  from tensorboard.summary.writer.record_writer import RecordWriter

  def broken(self, event):
    raise OverflowError("timestamp too large")

  happens.append(lambda: monkeypatch.setattr(RecordWriter, "write", broken))
  train(alone[0], tmp_path / "run")
  assert capsys.readouterr().out.count("the run goes on without TensorBoard: OverflowError") == 1
  assert len(records(tmp_path / "run")) == 12


def test_events_that_a_full_disk_refuses_are_an_error(begun, tmp_path, monkeypatch):
  from tensorboard.summary.writer.record_writer import RecordWriter

  def full(self, event):
    raise OSError(errno.ENOSPC, "No space left on device")

  trackers = Trackers(begun, tmp_path, 0, [])
  monkeypatch.setattr(RecordWriter, "write", full)
  with pytest.raises(OSError, match="No space"):
    trackers.each(lambda tracker: tracker.scalars(1, {"loss": 1.0}))


@pytest.fixture
def begun(tmp_path):
  """The config of a run whose directory is there."""
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  return config


def test_a_directory_has_one_run_at_a_time(begun):
  directory = RunDirectory(begun)
  with pytest.raises(ConfigError, match="another process is running in this directory"):
    RunDirectory(begun)
  directory.close()
  RunDirectory(begun).close()


def test_a_summary_that_is_none_is_no_end_of_a_run(begun, tmp_path, said):
  moved = tmp_path / "run" / "damaged"
  of_no_run = '{"steps": 3, "final_loss": 1.5, "time_s": 3}'
  for number, text in enumerate(["[]", "{}", '{"steps": 3}', of_no_run, "3", "[1", "[" * 100_000, "\0"]):
    (tmp_path / "run" / "summary.json").write_text(text)
    directory = RunDirectory(begun)
    assert directory.summary() is None, text[:9]
    directory.close()
    assert "is not the summary of a run" in said.messages[-1], text[:9]
    assert (moved / ("summary.json" + f".{number}" * bool(number))).read_text() == text
  # One that cannot be set aside is an error of one line.
  (tmp_path / "run" / "summary.json").write_text("{}")
  directory = RunDirectory(begun)
  shutil.rmtree(moved)
  moved.write_text("no folder")
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


def test_an_entry_of_the_wrong_kind_is_refused(begun, tmp_path):
  for name in ("metrics.jsonl", "summary.json", "checkpoints", "tensorboard"):
    entry = tmp_path / "run" / name
    entry.mkdir() if "." in name else entry.write_text("x")
    with pytest.raises(ConfigError, match=f"{name} in it is "):
      RunDirectory(begun)
    entry.rmdir() if "." in name else entry.unlink()


def test_a_run_is_heard_though_a_plug_in_turns_logging_off(tmp_path, capsys):
  with Output():
    logging.disable()
    try:
      say_last("error: the end")
    finally:
      logging.disable(logging.NOTSET)
  assert capsys.readouterr().err == "error: the end\n"


def test_runs_in_two_threads_do_not_show_each_other_s_lines():
  shown = [io.StringIO(), io.StringIO()]
  both = threading.Barrier(2, timeout=60)

  def run(number):
    with Output() as output:
      output.show_on(rich.console.Console(file=shown[number]), quiet=False)
      both.wait()
      LINES.info(f"line {number}")
      both.wait()

  threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [file.getvalue() for file in shown] == ["line 0\n", "line 1\n"]


def test_what_a_plug_in_prints_ends_no_command(tmp_path):
  file = Broken()
  with contextlib.redirect_stdout(file), Output() as output, output.of_everyone():
    print("from a plug-in", flush=True)
