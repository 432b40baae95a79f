"""Runs under faults: what is done to them, how they are compared, and that no wrong config brings a traceback."""

import json
import random

import pytest

from benchmarks.chaos import _damage, _suite
from benchmarks.chaos._contents import difference


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
