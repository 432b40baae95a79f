"""Writes the tables of benchmarks/README.md from the JSON in benchmarks/results.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent
MODELS = {
  "tf": "transformer, 3.3M parameters, 1024 tokens: bound by matrix products",
  "tf_opt": "transformer, 12.9M parameters, 32 tokens: bound by the optimiser",
  "mlp": "perceptron, 7k parameters: bound by dispatch",
}


def overhead(report: dict[str, Any]) -> str:
  """Time, temporaries and instructions beside the hand-written step."""
  lines = []
  for model, rows in report["models"].items():
    lines += [
      f"{MODELS[model]}",
      "",
      "| step | ms | ratio (quartiles) | temporaries MB | ratio | instructions |",
      "|---|---|---|---|---|---|",
    ]
    lines += [
      f"| {name} | {row['ms']:.3f} | {row['ratio']:.3f} ({row['q25']:.3f} to {row['q75']:.3f}) | "
      f"{row['temp_bytes'] / 1e6:.2f} | {row['temp_ratio']:.3f} | {row['ops_ratio']:.2f}x |"
      for name, row in rows.items()
    ]
    lines.append("")
  return "\n".join([*lines, provenance(report)])


def quality(report: dict[str, Any]) -> str:
  """Evaluation loss by policy, from one seed."""
  base = report["runs"]["fp32"]["eval_loss"]
  lines = ["| policy | bits per byte | eval loss | against fp32 | skipped steps |", "|---|---|---|---|---|"]
  lines += [
    f"| {name} | {run['eval_bits_per_byte']:.3f} | {run['eval_loss']:.4f} | "
    f"{run['eval_loss'] / base - 1:+.2%} | {run['skipped_steps']} of {run['steps']} |"
    for name, run in report["runs"].items()
  ]
  return "\n".join([*lines, "", provenance(report)])


def provenance(report: dict[str, Any]) -> str:
  """How the figures were made."""
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return f"`{report['command']}` on {report['device']}; {versions}."


def main() -> None:
  """Replaces what stands between each pair of markers."""
  file = FOLDER / "README.md"
  text = file.read_text()
  for name, make in (("overhead_cpu", overhead), ("quality_gpt_cpu", quality)):
    table = make(json.loads((FOLDER / "results" / f"{name}.json").read_text()))
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    text = re.sub(pattern, lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)
  file.write_text(text)


if __name__ == "__main__":
  main()
