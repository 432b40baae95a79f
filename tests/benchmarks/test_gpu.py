"""The suite of a GPU: on a CPU its processes train, take turns, and say what is missing."""

import argparse
import importlib.util

import pytest

from benchmarks import gpu
from tests import _quick_compile as quick


def options(*words):
  parser = argparse.ArgumentParser()
  gpu.add_arguments(parser)
  return parser.parse_args(["--size", "tiny", "--rounds", "2", *words])


@pytest.mark.slow
def test_steps_train_and_take_turns_on_a_cpu(monkeypatch, capsys):
  for name, value in quick.environment(1).items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(gpu, "STEPS", [("mpjax", "bf16"), ("mpjax", "fp8"), ("torch", "bf16")])
  report = gpu.run(options("--cpu"))
  steps = [row["step"] for row in report["rows"]]
  assert steps[:2] == ["mpjax bf16", "mpjax fp8"]
  assert all(row["seconds"] > 0 and row["loss"] < 6 for row in report["rows"])  # ln 256 is 5.5
  said = capsys.readouterr().out
  assert ("torch bf16: left out: " in said) == (importlib.util.find_spec("torch") is None)
  assert all(f"| {step} | " in said for step in steps)
