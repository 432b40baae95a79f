"""The command of the benchmarks, and what it makes of a suite's rows."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from benchmarks import _runner
from benchmarks._runner import Row

ROOT = pathlib.Path(__file__).parents[2]


def bench(*arguments):
  command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "status", "says"),
  [
    (["--help"], 0, "quality"),
    (["no-such-suite"], 2, "invalid choice"),
    (["quality", "--json", "/no/such/folder/out.json"], 2, "there is no folder /no/such/folder"),
    (["quality", "--match", "no such row"], 1, "--match no such row: none of 46 rows has that in its name"),
    (["layerwise", "--match", "^float32$"], 0, '"case": "float32"'),
  ],
)
def test_the_command_line(arguments, status, says):
  done = bench(*arguments)
  assert done.returncode == status
  assert says in done.stdout + done.stderr


def a_suite(**measured):
  rows = lambda: [Row({"model": name}, lambda found=found: found) for name, found in measured.items()]
  return types.SimpleNamespace(rows=rows, table=lambda report: f"{len(report['rows'])} rows in all")


def options(file, match=None):
  return argparse.Namespace(json=file, match=match and re.compile(match), jobs=2, row=None)


def test_what_fails_is_named_and_what_is_there_is_not_measured_again(tmp_path, monkeypatch, capsys):
  file, asked = tmp_path / "report.json", []

  def apart(suite, row):
    asked.append(row.name)
    return row.measure()

  monkeypatch.setattr(_runner, "_apart", apart)
  monkeypatch.setattr(_runner, "commit", lambda: "0123abc")
  suite = a_suite(gpt={"peak": 3}, vit={"error": "no memory"})
  assert _runner.run(suite, "memory", options(file)) == 1
  assert "1 of 2 rows failed" in capsys.readouterr().err
  suite = a_suite(gpt={"peak": 4}, vit={"peak": 5})
  report = _runner.run(suite, "memory", options(file))
  assert asked == ["gpt", "vit", "vit"]
  assert [(row["name"], row["model"], row["peak"]) for row in report["rows"]] == [
    ("gpt", "gpt", 3),
    ("vit", "vit", 5),
  ]
  assert report == json.loads(file.read_text())
  assert "2 rows in all" in capsys.readouterr().out
  file.write_text(json.dumps(json.loads(file.read_text()) | {"commit": "another"}))
  assert _runner.run(suite, "memory", options(file, "gpt"))["rows"][0]["peak"] == 4
