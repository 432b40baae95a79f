"""Runs under faults: one ends as its twin, and whatever differs between two is found."""

import random
import shutil

import pytest

from benchmarks.__main__ import main
from benchmarks.chaos import EXAMPLES, Run, contents, differences, table
from benchmarks.chaos._contents import checkpoints


def test_only_records_that_were_destroyed_may_be_missing():
  twin, without = {"record 1": "a", "record 2": "b"}, {"record 2": "b"}
  assert differences(twin, twin) == []
  assert differences(without, twin) == ["record 1: None, expected a"]
  assert differences(without, twin, {1}) == differences(twin, without, {1}) == []
  assert differences(without | {"record 1": "c"}, twin, {1}) == ["record 1: c, expected a"]


@pytest.mark.slow
def test_a_run_that_was_killed_and_damaged_ends_as_its_twin_and_no_other_does(tmp_path, monkeypatch, capsys):
  monkeypatch.delenv("XLA_FLAGS")  # a start says itself how many devices there are
  example, alone, other = EXAMPLES[1], tmp_path / "alone", tmp_path / "other"
  twin = Run(example, alone, tmp_path).end()
  run = Run(example, tmp_path / "run", tmp_path, twin, random.Random(28))
  run.disturb("SIGKILL in a checkpoint write")
  run.disturb("SIGTERM")
  run.damage_checkpoint()
  run.damage_metrics()
  run.end()
  assert run.problems == []
  counted = table({"runs": [{"example": example.name, "faults": run.faults, "problems": []}]})
  kinds = ("SIGKILL in a checkpoint write", "SIGTERM", "checkpoint damaged", "metrics.jsonl damaged")
  assert all(f"| {kind} | 0 | 1 | 0 | 0 |" in counted for kind in kinds), run.faults
  shutil.copytree(alone, other)
  assert main(["chaos", "--compare", str(alone), str(other)]) == 0
  metrics = other / "metrics.jsonl"
  metrics.write_text(metrics.read_text().replace('"step": 7, "loss": ', '"step": 7, "loss": 1', 1))
  assert [line.partition(":")[0] for line in differences(contents(other), twin)] == ["record 7"]
  before, newest = checkpoints(other)
  shutil.rmtree(newest)
  before.rename(newest)
  assert main(["chaos", "--compare", str(alone), str(other)]) == 1
  assert f"checkpoint {newest.name} params/" in capsys.readouterr().out
