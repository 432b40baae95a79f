"""Trackers, the profile and the time by part: what they take of a run, and that they change nothing in it."""

import gzip
import importlib.machinery
import json
import sys
import time
import types

import jax
import pytest

import mpjax

# Counts calls of the pass that makes the figures.
from mpjax.numerics import Watcher
from tests.train._runs import curve, refused, train, train_until_killed, write_line

BOTH = "train.trackers=[tensorboard,wandb]"


class Wandb(types.ModuleType):
  """Stands for the package wandb: its runs by id, and what it does with steps that go back."""

  def __init__(self):
    super().__init__("wandb")
    self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    self.runs, self.options, self.broken = {}, [], None

  def Histogram(self, *, np_histogram):
    counts, edges = np_histogram
    assert len(edges) == len(counts) + 1
    return sum(counts)

  def init(self, **options):
    self.options.append(options)
    if self.broken == "init":
      raise RuntimeError("api_key not\nconfigured")
    return self.runs.setdefault(options["id"], Run(self)).resumed()


class Run:
  def __init__(self, module):
    self.module, self.rows, self.summary, self.ends = module, {}, {}, []

  def resumed(self):
    self.step = max(self.rows, default=-1) + 1
    return self

  def log(self, values, step):
    if self.module.broken == "log":
      raise BrokenPipeError(32, "Broken pipe")
    assert step >= max(self.step, *self.rows, 0), "wandb drops it, and warns"
    self.rows.setdefault(step, {}).update(values)

  def finish(self, exit_code):
    self.ends.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
  module = Wandb()
  monkeypatch.setitem(sys.modules, "wandb", module)
  return module


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """The arguments and the directory of a run without trackers."""
  folder = tmp_path_factory.mktemp("alone")
  arguments = write_line(folder)
  train(arguments, folder / "run", "train.trackers=[]")
  return arguments, folder / "run"


def test_a_resumed_run_continues_its_run_in_wandb_and_logs_no_step_twice(alone, wandb, tmp_path):
  arguments, out = [*alone[0], BOTH, "numerics.every=3"], tmp_path / "run"
  train_until_killed(arguments, out, 11)  # resumes after step 8
  train(arguments, out)
  (run,) = wandb.runs.values()
  rows = {step: row for step, row in run.rows.items() if "loss" in row}
  lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
  assert {step: row["loss"] for step, row in rows.items()} == {line["step"]: line["loss"] for line in lines}
  assert [step for step, row in rows.items() if "numerics/updates lost in float16 weights" in row] == [
    *range(3, 21, 3)
  ]
  assert any(name.startswith("parameters/") for name in rows[3])
  assert run.ends == [1, 0]
  assert run.summary["final_loss"] == lines[-1]["loss"]
  for options in wandb.options:
    assert options["config"]["optimizer"]["learning_rate"] == 0.1
    assert (options["resume"], options["dir"]) == ("allow", str(out))
    assert "mode" not in options
  assert curve(out) == curve(alone[1])
  assert not (alone[1] / "tensorboard").exists()


@pytest.mark.parametrize("broken", ["init", "log"])
def test_a_run_goes_on_without_wandb(alone, wandb, tmp_path, capsys, broken):
  wandb.broken = broken
  train(alone[0], tmp_path / "run", BOTH)
  told = {"init": "wandb: RuntimeError: api_key not configured", "log": "WandB: BrokenPipeError"}
  assert capsys.readouterr().out.count(f"the run goes on without {told[broken]}") == 1
  assert curve(tmp_path / "run") == curve(alone[1])


def test_a_run_that_needs_wandb_says_how_to_install_it_and_leaves_nothing(
  alone, tmp_path, capsys, monkeypatch
):
  out = tmp_path / "run"
  for found in (None, types.ModuleType("wandb")):  # missing, or a folder of old runs in the working directory
    monkeypatch.setitem(sys.modules, "wandb", found)
    refused(["train", *alone[0], BOTH, f"out={out}"], ["train.trackers", "pip install", "[wandb]"], capsys)
  assert not out.exists()


class Own:
  def __init__(self):
    self.steps, self.summary = [], None

  def scalars(self, step, values):
    self.steps.append(step)
    if step == 4:
      raise KeyError("mine")

  def histogram(self, step, name, edges, counts):
    raise AssertionError

  def close(self, summary):
    self.summary = summary


def test_a_callers_tracker_is_called_until_it_raises(alone, tmp_path, capsys):
  own = Own(), Own()
  own[1].scalars = lambda step, values: own[1].steps.append(step)
  result = mpjax.train.run(alone[0][0], [f"out={tmp_path / 'run'}", "train.trackers=[]"], trackers=own)
  assert capsys.readouterr().out.count("the run goes on without Own: KeyError: 'mine'") == 1
  assert own[0].steps == [1, 2, 3, 4]
  assert own[1].steps == list(range(1, 21))
  assert own[1].summary == result.summary
  assert own[0].summary is None
  assert curve(tmp_path / "run") == curve(alone[1])


def test_what_is_no_tracker_is_refused_before_the_run(tmp_path):
  for wrong in (Own(), [Own], "wandb", None, [3]):
    with pytest.raises(TypeError, match=r"trackers=.*expected a list"):
      mpjax.train.run("gpt_stdlib", [f"out={tmp_path / 'run'}"], trackers=wrong)
  assert not (tmp_path / "run").exists()


def test_a_run_that_nothing_tracks_makes_no_figures(alone, tmp_path, monkeypatch):
  monkeypatch.setattr(Watcher, "look", lambda *_: pytest.fail("an extra pass for nobody"))
  train(alone[0], tmp_path / "run", "train.trackers=[]", "numerics.every=1")


def traces(out):
  return list(out.glob("profile/plugins/profile/*/*.xplane.pb"))


def test_chosen_steps_are_profiled_also_if_the_run_ends_in_between(alone, tmp_path, capsys):
  arguments, out = [*alone[0], "train.profile_steps=[3,6]"], tmp_path / "run"
  train_until_killed(arguments, out, 5)
  assert f"a profile is in {out / 'profile'}: open it with xprof" in capsys.readouterr().out
  (first,) = traces(out)
  first.parent.rename(out / "profile" / "first")  # a folder is named by the second in which it was made
  lines = train(arguments, out)  # resumes after step 4
  assert f"a profile is in {out / 'profile'}" in capsys.readouterr().out
  (newest,) = traces(out)
  (file,) = newest.parent.glob("*.trace.json.gz")
  events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
  assert [event["args"]["step_num"] for event in events if event.get("name") == "train"] == ["5", "6"]
  assert len(lines) == 20
  assert curve(out) == curve(alone[1])
  train(arguments, tmp_path / "past", "train.profile_steps=[20,30]")
  assert "a profile is in" in capsys.readouterr().out


def test_a_profile_that_fails_ends_no_run(alone, tmp_path, capsys):
  with jax.profiler.trace(tmp_path / "mine"):
    train(alone[0], tmp_path / "run", "train.profile_steps=[3,6]")
  out = capsys.readouterr().out
  assert out.count("the run goes on without a profile: ") == 1
  assert "a profile is in" not in out
  assert curve(tmp_path / "run") == curve(alone[1])


def test_the_summary_has_the_time_by_part(alone, tmp_path, capsys):
  out, began = tmp_path / "run", time.perf_counter()
  result = mpjax.train.run(alone[0][0], [f"out={out}"])
  took = time.perf_counter() - began
  parts = result["time_s"]
  assert list(parts) == ["start", "compile", "data", "step", "evaluation", "checkpoint"]
  assert min(parts.values()) > 0
  assert took / 2 < sum(parts.values()) < took
  assert f"{sum(parts.values()):.4g} s: start " in capsys.readouterr().out.replace("\n", "")
  assert "time_s_from_step" not in result.summary
  assert mpjax.train.run(alone[0][0], [f"out={out}", "train.steps=22"])["time_s_from_step"] == 20
