"""The memory suite: what its tables and pictures say of a report, and a step compiled for this machine."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.memory import _suite as memory


def report(figure="compiled"):
  """Peaks that are lines: 12 bytes a parameter and so many MB a row."""
  a_row = {"fp32": 100, "bf16": 50}
  point = lambda sweep, policy, rows, parameters: {
    "model": "gpt",
    "sweep": sweep,
    "policy": policy,
    "rows": rows,
    "parameters": parameters,
    "state": 12 * parameters,
    "analytic": {"peak": 0.9 * (12 * parameters + 1e6 * a_row[policy] * rows)},
    figure: {"peak": 12 * parameters + 1e6 * a_row[policy] * rows},
  }
  return {
    "command": "python scripts/bench.py memory",
    "device": "a device",
    "versions": {"jax": "1"},
    "target": "h200:1",
    "rows": [
      *(point("rows", policy, rows, 10**8) for policy in ("bf16", "fp32") for rows in (4, 2)),
      *(point("sizes", policy, 1, size) for policy in ("bf16", "fp32") for size in (10**8, 10**7)),
      {"model": "vit", "sweep": "rows", "policy": "fp32", "rows": 2, "error": "no memory"},
    ],
  }


def test_tables_fit_what_a_row_and_a_parameter_cost():
  text = memory.tables(report())
  assert "| fp32 | 1.40 | 1.60 | 100.0 | 1.00 | 12.0 | 12.0 | 0.90 |" in text
  assert "| bf16 | 1.30 | 1.40 | 50.0 | 0.50 | 12.0 | 12.0 | 0.90 |" in text
  assert "| bf16 | 0.170 | 1.250 | 12.00 | 12.00 | 0.90 |" in text
  assert text.index("| fp32 |") < text.index("| bf16 |")
  assert text.endswith("`python scripts/bench.py memory` on a device; jax 1.")
  assert "ViT" not in text


def test_what_a_gpu_measures_goes_before_what_its_compiler_says():
  measured = report("measured")
  for row in measured["rows"]:
    row["compiled"] = {"peak": 1.05 * row["measured"]["peak"]} if "measured" in row else {"peak": 0}
  text = memory.tables(measured)
  assert "compiled over measured" in text
  assert "| bf16 | 1.30 | 1.40 | 50.0 | 0.50 | 12.0 | 12.0 | 1.05 |" in text


def test_a_panel_a_model_and_a_line_a_policy():
  figures = memory.pictures(report())
  assert set(figures) == {"memory_rows_h200", "memory_sizes_h200"}
  (ax,) = figures["memory_rows_h200"].axes
  assert ax.get_title(loc="left") == "GPT"
  points, fitted = ax.lines[:2]
  assert list(points.get_ydata()) == pytest.approx([1.4, 1.6])
  assert list(fitted.get_ydata()) == pytest.approx([1.2, 1.6])


@pytest.mark.slow
def test_a_sweep_here_and_again(monkeypatch, tmp_path, capsys):
  tiny = memory.Sweep(
    "GPT",
    "16 tokens",
    {"seq_len": 16, "vocab_size": 64},
    (8, 64),
    {"seq_len": 8, "vocab_size": 64},
    ({"dim": 16, "layers": 1, "heads": 2}, {"dim": 32, "layers": 1, "heads": 2}),
  )
  monkeypatch.setattr(memory, "SWEEPS", {"gpt": tiny})
  path = tmp_path / "report.json"
  parser = argparse.ArgumentParser()
  memory.add_arguments(parser)
  options = parser.parse_args(["--policy", "fp32", "--sweep", "rows"])
  options.json = path
  report = memory.run(options)
  assert json.loads(path.read_text()) == report
  few, many = report["rows"]
  assert many["compiled"]["peak"] > few["compiled"]["peak"] > few["state"] > 12 * few["parameters"] > 0
  assert few["state"] == pytest.approx(12 * few["parameters"], rel=1e-3)
  assert "fp32" in memory.tables(report)

  capsys.readouterr()
  assert memory.run(options) == report
  assert "rows  " not in capsys.readouterr().out  # nothing was compiled again
