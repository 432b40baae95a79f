"""Runs through what a month of use brings: damaged metrics, lost terminals, lost directories, strange checkpoints."""

import errno
import io
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import rich.console

from mpjax.train import ConfigError, DataError, load_config, register_data

# The lines of a command, and what a run shows of a step, to disturb it there.
from mpjax.train.loop import _loop
from mpjax.train.loop._sinks import Output, open_metrics
from mpjax.train.setup._saved_run import RunDirectory
from tests._quick_compile import environment as quick_environment
from tests.train._runs import Points, curve, raises_one_line, refused, train, write_line
from tests.train._tiny_gpt import records

ROOT = pathlib.Path(__file__).parents[2]
# Orbax drops what was under way where its folder is gone: Python says so whenever it collects that.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LINES = logging.getLogger("mpjax.train")
SHORT = ["train.steps=12", "train.eval_every=12", "train.checkpoint_every=4"]


def line(step):
  return json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n"


def test_every_readable_record_up_to_the_checkpoint_is_kept_once(tmp_path):
  file, first = tmp_path / "metrics.jsonl", line(1) + line(2)
  for content, kept in [
    (first + line(3) + line(4) + line(5) + line(6), [1, 2, 3, 4]),
    (line(1) + b"\n" + line(2) + b"a note\n[1]\n" + line(3) + line(4), [1, 2, 3, 4]),
    (first + b"\xff" + line(3) + b'{"step": {}}\n' + line(4), [1, 2, 4]),
    (first + line(2) + line(3) + line(4)[:-1], [1, 2, 3, 4]),
    (b"[" * 100_000 + b"\n" + first + line(5)[:9], [1, 2]),
    (b"", []),
  ]:
    file.write_bytes(content)
    with open_metrics(file, resume_step=4) as metrics:
      metrics.write('{"step": 5}\n')
    assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [*kept, 5], content[:99]


class Broken(io.StringIO):
  """A stream whose reader has gone after some characters."""

  def write(self, text):
    if self.tell() + len(text) > 8:
      raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    return super().write(text)


def test_a_reader_that_goes_away_is_told_once_and_raises_nothing(monkeypatch, capsys):
  for closed in (Broken(), None):
    monkeypatch.setattr(sys, "stdout", closed)
    with Output():
      for text in ("first", "second", "third"):
        LINES.info(text)
      LINES.error("error: fourth")
    first, *rest = capsys.readouterr().err.splitlines()
    assert rest == ["error: fourth"] if closed else first == "error: fourth"
  monkeypatch.setattr(sys, "stderr", None)
  with Output(rich.console.Console(file=Broken())):
    LINES.info("a line that is too long")
    LINES.error("error: unseen")


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
  waiting, shown = [], _loop.show_record

  def show(setup, record):
    shown(setup, record)
    if record["step"] == 6 and waiting:
      waiting.pop()()

  monkeypatch.setattr(_loop, "show_record", show)
  return waiting


def test_a_run_directory_that_is_gone_ends_the_run_in_one_line_and_nothing_is_lost(
  alone, happens, tmp_path, capsys
):
  # What is being written would be made again.
  arguments, run, other = [*alone[0], "train.checkpoint_wait=true"], tmp_path / "run", tmp_path / "other"
  happens.append(lambda: run.rename(other))
  refused(["train", *arguments, f"out={run}"], [str(run), "cannot be written"], capsys, status=4)
  assert not run.exists()
  train(alone[0], other)
  assert curve(other) == curve(alone[1])


def test_a_checkpoint_of_another_step_or_run_is_passed_over(alone, tmp_path, capsys):
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
  for name, words in {
    "copied": "step 1000 is damaged: it is of step 8",
    "foreign": "it is of another run (optimizer.learning_rate: 0.5 there, 0.1 here), for which there is",
  }.items():
    capsys.readouterr()
    train(arguments, runs[name])
    assert words in capsys.readouterr().out
    assert curve(runs[name]) == curve(whole)
  # There is no other one.
  words = ["step 11 is damaged: it is of step 8"]
  refused(["train", *arguments, f"out={runs['renamed']}"], words, capsys, status=4)


@pytest.mark.parametrize(
  ("error", "said"),
  [
    (FileNotFoundError(2, "No such file", "/data/part-7.bin"), "/data/part-7.bin: No such file"),
    (DataError("a.bin: token 5000 is 900"), "a.bin: token 5000 is 900"),
  ],
)
def test_a_run_whose_data_is_gone_says_so_and_goes_on_once_it_is_back(
  alone, happens, tmp_path, capsys, error, said
):
  out, raised = tmp_path / "run", []

  class Torn(Points):
    def __getitem__(self, index):
      if raised:
        raise raised[0]
      return super().__getitem__(index)

  register_data("torn")(lambda: (Torn(64, 1000), Points(16, 1000)))
  command = [*alone[0], "train.checkpoint_wait=true", "data.kind=torn"]
  happens.append(lambda: raised.append(error))
  told = (
    f"the newest checkpoint is of step 8 in {out}: the same command resumes from it once the data is back"
  )
  refused(["train", *command, f"out={out}"], [f"the data of step 9 cannot be read: {said}", told], capsys)
  raised.clear()
  train(command, out)
  assert curve(out) == curve(alone[1])


@pytest.fixture
def begun(tmp_path):
  """The config of a run whose directory is there."""
  config = load_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
  return config


def test_a_directory_has_one_run_at_a_time(begun):
  directory = RunDirectory(begun)
  with pytest.raises(ConfigError, match="another process is running in this directory"):
    RunDirectory(begun)
  directory.close()
  RunDirectory(begun).close()


def test_a_start_that_was_over_before_it_had_a_config_leaves_a_directory_to_start_in(begun, tmp_path):
  (tmp_path / "run" / "config.yaml").rename(tmp_path / "run" / "config.yaml.tmp")  # as a kill leaves it
  RunDirectory(begun).close()
  (tmp_path / "run" / "checkpoints" / "8").mkdir(parents=True)  # of whatever, without a config
  raises_one_line(ConfigError, ["not a run directory"], RunDirectory, begun)


def test_a_run_of_another_config_is_refused_once_it_has_a_record(begun, tmp_path):
  other, metrics = load_config(begun, ["seed=3"]), tmp_path / "run" / "metrics.jsonl"
  metrics.touch()
  RunDirectory(other).close()
  metrics.write_text('{"step": 1}\n')
  raises_one_line(ConfigError, ["seed: 0 there, 3 here"], RunDirectory, other)


def test_a_run_directory_with_a_link_in_it_is_refused(begun, tmp_path):
  out, victim = tmp_path / "run", tmp_path / "victim"
  victim.write_text("precious")
  for name in (
    ".lock",
    "config.yaml.tmp",
    "metrics.jsonl",
    "checkpoints",
    "checkpoints/8",
    "tensorboard/events",
  ):
    link = out / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    raises_one_line(ConfigError, [f"{name} in it is a link"], RunDirectory, begun)
    assert victim.read_text() == "precious", name
    link.unlink()


def test_a_run_directory_may_itself_be_a_link(begun, tmp_path):
  (tmp_path / "run").rename(tmp_path / "disk")
  (tmp_path / "run").symlink_to(tmp_path / "disk")
  RunDirectory(begun).close()


def test_a_run_directory_with_a_damaged_config_is_refused(begun, tmp_path):
  for text in ("!!python/name:os.system", "[1", "[" * 100_000, "\0"):
    (tmp_path / "run" / "config.yaml").write_text(text)
    raises_one_line(ConfigError, ["config.yaml"], RunDirectory, begun)
