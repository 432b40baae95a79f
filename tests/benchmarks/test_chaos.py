"""Runs under faults: what is done to them, how they are compared, and that no wrong config brings a traceback."""

import json
import pathlib
import random
import subprocess
import sys

import pytest

from benchmarks.chaos import _damage, _mutations, _suite, _table
from benchmarks.chaos._contents import difference
from benchmarks.chaos._starts import HUNG
from benchmarks.chaos._trial import Wrong, judge
from mpjax.train import Config, ConfigError, load_config
from tests.benchmarks.test_bench import bench

ROOT = pathlib.Path(__file__).parents[2]


def test_a_wrong_config_is_refused_in_one_line_or_loads(tmp_path):
  chance = random.Random(7)
  trees = {name: load_config(name).model_dump(mode="json") for name in _mutations.BASE}
  refused = []
  for _ in range(60):
    file, overrides, told = _mutations.mutated(tmp_path, trees, chance)
    try:
      assert isinstance(load_config(file, overrides), Config), told
    except ConfigError as error:
      refused.append(str(error))
  assert len(refused) > 20
  assert not [text for text in refused if "\n" in text]


@pytest.mark.parametrize("seed", range(12))
def test_damage_to_metrics_destroys_the_records_that_it_says(tmp_path, seed):
  def steps():
    found = set()
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
      try:
        found.add(json.loads(line)["step"])
      except ValueError:
        continue
    return found

  file = tmp_path / "metrics.jsonl"
  file.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 31)))
  before = steps()
  damage = _damage.damage_metrics(tmp_path, random.Random(seed))
  assert damage is not None
  assert before - steps() == damage.destroyed


def test_a_run_differs_from_its_twin_in_all_that_was_not_destroyed():
  twin = {"records": {"1": "a", "2": "b"}, "summary": {}, "arrays": {"w": "x"}, "step": 2}
  assert difference(twin, twin, set()) == ""
  without = twin | {"records": {"2": "b"}}
  assert "records: 1 differ, such as 1" in difference(without, twin, set())
  assert difference(without, twin, {1}) == ""
  assert "such as 1: other, expected a" in difference(twin | {"records": {"1": "other", "2": "b"}}, twin, {1})
  assert "arrays: 1 differ, such as w" in difference(twin | {"arrays": {"w": "y"}}, twin, set())


def test_the_table_counts_faults_by_kind_and_outcome():
  fault = {"kind": "pause", "detail": "1 s", "outcome": "trained on to the end", "right": True}
  run = {"example": "gpt_stdlib", "faults": [fault, fault], "same": True, "taken_again": [4]}
  other = run | {"faults": [fault | {"outcome": "killed"}], "same": False}
  report = {"command": "c", "device": "d", "versions": {}, "minutes": 1, "checkpoint_every": 10}
  table = _suite.table(report | {"runs": [run, other]})
  assert "| pause | 3 | trained on to the end: 2; killed: 1 | 2 |" in table
  assert "1 of 2 runs ended as their twins, after 3 faults in 1 minutes" in table


ROWS = """
import os, sys
from benchmarks.__main__ import main
from benchmarks.chaos import _suite
from benchmarks.chaos._trial import NotHere, Row, Wrong, each

def fail(trial, error):
  raise error

errors = {"bad": (Wrong("other numbers"),), "elsewhere": (NotHere("no disk"),), "broken": (KeyError("x"),)}
others = {"good": lambda trial: "went on", "gone": lambda trial: os._exit(3)}
rows = [Row("first", "the same", {"fine": lambda trial: None}), Row("second", "one", each(fail, errors) | others)]
_suite.table_rows, _suite.prepare, _suite.warm_up = lambda prepared: rows, lambda *_: None, lambda cache: None
print(*(main(["chaos", "--table", "--rows", regex, "--json", sys.argv[1]]) for regex in ("first", "")))
"""


def test_a_case_that_fails_is_told_and_the_command_ends_with_status_1(tmp_path):
  file = tmp_path / "report.json"
  shown = subprocess.run(
    [sys.executable, "-c", ROWS, str(file)], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout
  assert shown.endswith("\n0 1\n")
  assert "1 of 1  first" in shown
  assert "WRONG: bad: other numbers" in shown
  report = json.loads(file.read_text())
  first, second = report["rows"]
  assert (first["right"], first["of"], first["wrong"]) == (1, 1, [])
  assert (second["right"], second["of"], second["counted"]) == (1, 4, {"went on": 1})
  assert [case["case"] for case in second["wrong"]] == ["bad", "broken", "gone"]
  assert "KeyError" in second["wrong"][1]["detail"]
  assert second["not_tried"] == [{"case": "elsewhere", "detail": "no disk"}]
  table = _table.table(report)
  assert "| second | 1 of 4 (went on: 1) | one | bad: other numbers;" in table
  assert "1 not tried (no disk)" in table
  assert "2 of 5 cases ended as they have to" in table


@pytest.mark.parametrize(
  ("statuses", "said", "allowed", "wrong"),
  [
    ([0], "fine", (0,), ""),
    ([2], "error: no", (2,), ""),
    ([2], "mpjax plan: error: no", (2,), ""),
    ([0], "fine", (2,), "ended with 0, expected 2"),
    ([2], "no", (2,), "0 error lines"),
    ([2], "error: no\nerror: no", (2,), "2 error lines"),
    ([1], "Traceback (most recent call last):", (1,), "a traceback, status 1"),
    ([HUNG], "", (0,), "hung"),
    ([5, 134], "process 0: error: gone", (5, 134), ""),
  ],
)
def test_how_a_start_ended_is_judged(statuses, said, allowed, wrong):
  if not wrong:
    return judge(statuses, said, allowed)
  with pytest.raises(Wrong, match=wrong):
    judge(statuses, said, allowed)


@pytest.mark.slow
def test_a_row_of_the_table_is_tried(tmp_path):
  file = tmp_path / "report.json"
  done = bench("chaos", "--table", "--rows", "summary.json", "--json", str(file))
  assert done.returncode == 0, done.stdout + done.stderr
  (row,) = json.loads(file.read_text())["rows"]
  assert row["right"] == row["of"] == 9
