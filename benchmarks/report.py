"""Writes the tables of benchmarks/README.md, and some in docs/, from the JSON in benchmarks/results.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import pathlib
import re
import textwrap
from typing import Any

FOLDER = pathlib.Path(__file__).parent
MODELS = {
  "tf": "transformer, 3.3M parameters, 1024 tokens: bound by matrix products",
  "tf_opt": "transformer, 12.9M parameters, 32 tokens: bound by the optimiser",
  "mlp": "perceptron, 7k parameters: bound by dispatch",
  "mlp_scan": "the same perceptron, 500 steps in one program",
}
SOME_LAYERS = (0, 4, 8, 12, 16, 20, 24, 28, 31)


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


def peers(report: dict[str, Any]) -> str:
  """Ratio to the bare step by library and model, then temporaries and instructions."""
  tables = report["models"]
  names = list(next(iter(tables.values())))
  lines = ["| step | " + " | ".join(tables) + " |", "|---|" + "---|" * len(tables)]
  for name in names:
    cells = [f"{rows[name]['ratio']:.2f}" for rows in tables.values()]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  once = {title.split(",")[0]: rows for title, rows in tables.items()}
  lines += ["", "| step | " + " | ".join(f"{model}: temporaries MB, instructions" for model in once) + " |"]
  lines.append("|---|" + "---|" * len(once))
  for name in names:
    cells = [
      f"{rows[name]['temp_bytes'] / 1e6:.2f}, {rows[name]['ops_ratio']:.2f}x" for rows in once.values()
    ]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join([*lines, "", provenance(report)])


def compiled(report: dict[str, Any]) -> str:
  """Memory of the step with a loss scale beside that without."""
  lines = [
    "| compute dtype | rows | temporaries MB, bare | scaled | ratio | donated | bytes | instructions |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    bare, scaled = row["bare"], row["mpjax.dynamic_loss_scale"]
    accessed = f"{scaled['bytes_accessed'] / bare['bytes_accessed']:.2f}" if bare["bytes_accessed"] else "-"
    aliased = "all reused" if scaled["alias_bytes"] >= scaled["donated_array_bytes"] else "not all reused"
    before, after = bare["temp_bytes"], scaled["temp_bytes"]
    lines.append(
      f"| {row['dtype']} | {row['batch']} | {before / 1e6:.1f} | {after / 1e6:.1f} | {after / before:.3f} | "
      f"{aliased} | {accessed} | {scaled['ops'] / bare['ops']:.2f}x |"
    )
  return "\n".join([*lines, "", provenance(report)])


def layerwise(report: dict[str, Any]) -> str:
  """Share of zeros by layer and scale, and the losses after training."""
  table = report["gradients"]
  single = table["single"]
  lines = [
    "| layer | " + " | ".join(f"2^{k}" for k in single) + " | layer-wise |",
    "|---|" + "---|" * (len(single) + 1),
  ]
  for i in SOME_LAYERS:
    cells = [f"{row['zeros'][i]:.0%}" for row in (*single.values(), table["layerwise"])]
    lines.append(f"| {i} | " + " | ".join(cells) + " |")
  finite = ["yes" if row["finite"] else "no" for row in single.values()]
  lines += ["| finite | " + " | ".join([*finite, "yes"]) + " |", ""]
  lines += ["| trained with | eval loss | without the noise in it | skipped steps |", "|---|---|---|---|"]
  for name, run in report["runs"].items():
    title = name if name == "float32" else f"float16, {name}"
    skipped = f"{run['skipped']} of {run['steps']}"
    lines.append(f"| {title} | {run['eval_loss']:.4f} | {run['noiseless']:.4f} | {skipped} |")
  return "\n".join([*lines, "", provenance(report)])


def autocast_memory(report: dict[str, Any]) -> str:
  """Temporary memory of the gradient beside casts by hand, and the products by dtype."""
  lines = ["| gradient of | temporaries MB | ratio | matrix products |", "|---|---|---|---|"]
  for model, rows in report["models"].items():
    for name, row in rows.items():
      counts = ", ".join(f"{n} {dtypes}" for dtypes, n in row["products"].items())
      lines.append(
        f"| {model}, {name} | {row['temp_bytes'] / 1e6:.1f} | {row['temp_ratio']:.3f} | {counts} |"
      )
  return "\n".join([*lines, "", provenance(report)])


def autocast_time(report: dict[str, Any]) -> str:
  """Time of a training step beside casts by hand."""
  lines = ["| step | ms | ratio (quartiles) | temporaries MB |", "|---|---|---|---|"]
  lines += [
    f"| {model}, {name} | {row['ms']:.1f} | {row['ratio']:.3f} ({row['q25']:.3f} to {row['q75']:.3f}) | "
    f"{row['temp_bytes'] / 1e6:.1f} |"
    for model, rows in report["models"].items()
    for name, row in rows.items()
  ]
  return "\n".join([*lines, "", provenance(report)])


def autocast_trace(report: dict[str, Any]) -> str:
  """Seconds of tracing, lowering and compiling, and their ratios to the plain function's."""
  phases = ("trace", "lower", "compile", "total")
  lines = ["| gradient of | " + " | ".join(f"{phase} s (ratio)" for phase in phases) + " |", "|---" * 5 + "|"]
  for model, rows in report["models"].items():
    for name, row in rows.items():
      cells = [f"{row[f'{phase}_s']:.2f} ({row[f'{phase}_ratio']:.2f})" for phase in phases]
      lines.append(f"| {model}, {name} | " + " | ".join(cells) + " |")
  return "\n".join([*lines, "", provenance(report)])


def fp8_compiled(report: dict[str, Any]) -> str:
  """Which products are FP8 GEMMs, and the memory beside bfloat16's."""
  lines = [
    "| policy | eligible, of the forward FLOPs | FP8 of that: forward, backward | temporaries MB | ratio |",
    "|---|---|---|---|---|",
  ]
  for name, row in report["policies"].items():
    eligible = row["eligible"]["flops"] / row["all_forward_flops"]
    share = row["share"]
    cells = (
      ["-", "-"] if share is None else [f"{eligible:.1%}", f"{share['forward']:.0%}, {share['backward']:.0%}"]
    )
    lines.append(
      f"| {name} | {' | '.join(cells)} | {row['temp_bytes'] / 1e6:.1f} | {row['temp_ratio']:.3f} |"
    )
  return "\n".join([*lines, "", provenance(report)])


def provenance(report: dict[str, Any]) -> str:
  """How the figures were made."""
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return f"`{report['command']}` on {report['device']}; {versions}."


def numerics_memory(report: dict[str, Any]) -> str:
  """Peaks of an inspection's programs beside that of the training step."""
  names = ("step", "policy pass", "float32 pass")
  lines = [
    f"| policy | {' | '.join(f'{name} GB' for name in names)} | largest / step |",
    "|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    cells = " | ".join(f"{row[name] / 1e9:.2f}" for name in names)
    lines.append(f"| {row['policy']} | {cells} | {row['ratio']:.3f} |")
  return "\n".join([*lines, "", provenance(report)])


def numerics_time(report: dict[str, Any]) -> str:
  """Time of a look at a step, as a share of the steps between two."""
  lines = [
    "| config | policy | step ms | look ms | share | first step s | first look s |",
    "|---|---|---|---|---|---|---|",
  ]
  lines += [
    f"| {row['config']} | {row['policy']} | {1e3 * row['step_s']:.1f} | {1e3 * row['look_s']:.1f} | "
    f"{row['share']:.2%} | {row['first_step_s']:.1f} | {row['first_look_s']:.1f} |"
    for row in report["rows"]
  ]
  return "\n".join([*lines, "", provenance(report)])


def plan_accuracy(report: dict[str, Any]) -> str:
  """The analytic peak over the compiled one, and what the compiled one's parts account for."""
  lines = [
    "| step | compiled peak | analytic / compiled | explained by parts | compile s |",
    "|---|---|---|---|---|",
  ]
  lines += [
    f"| {row['model']} {row['size']} {row['policy']} | {row['peak']['compiled'] / 1e9:.2f} GB | "
    f"{row['peak_ratio']:.3f} | {row['explained']:.1%} | {row['compile_seconds']:.0f} |"
    for row in report["rows"]
  ]
  equal = sum(
    row[what]["analytic"] == row[what]["compiled"]
    for row in report["rows"]
    for what in ("arguments", "outputs")
  )
  rows = len(report["rows"])
  lines += [
    "",
    f"Argument and result bytes equal, analytic and compiled, in {equal} of {2 * rows} comparisons.",
  ]
  return "\n".join([*lines, "", provenance(report)])


def scaling(report: dict[str, Any]) -> str:
  """State, peak and what crosses of one chip, by policy and mesh."""
  lines = [
    "| chips | policy | mesh | state MB | peak MB | crossing, MB | sent MB |",
    "|---|---|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in row["sizes"].items() if size > 1) or "-"
    crossing = ", ".join(
      # Two numbers of float16 travel in a word of 32 bits.
      f"{c['operation']} {c['dtype'].replace('uint32', 'float16')} {c['bytes'] / 1e6:.0f}"
      for c in row["collectives"]
      if c["bytes"] > 1e6
    )
    lines.append(
      f"| {row['chips']} | {row['policy']} | {mesh} | {row['arguments'] / 1e6:.0f} | "
      f"{row['peak'] / 1e6:.0f} | {crossing or '-'} | {row['sent'] / 1e6:.0f} |"
    )
  return "\n".join([*lines, "", provenance(report)])


def chaos(report: dict[str, Any]) -> str:
  """How many killed runs ended as the one left alone, and what the kills cost."""
  kills = [kill for run in report["runs"] for kill in run["kills"]]
  ended = [kill["others_ended_after_s"] for kill in kills]
  same = sum(run["same"] for run in report["runs"])
  lost = [kill["lost_steps"] for kill in kills]
  runs, mean, apart = len(report["runs"]), sum(lost) / len(lost), report["checkpoint_every"]
  text = (
    f"{same} of {runs} runs of {report['processes']} processes ended with bit for bit the losses and the "
    f"skips of the run left alone, after {len(kills)} kills. A kill cost {mean:.0f} steps on average and "
    f"{max(lost)} at most, checkpoints being {apart} steps apart; the others had "
    f"ended {max(ended):.0f} s after it at the latest."
  )
  return f"{textwrap.fill(text, 118)}\n\n{provenance(report)}"


# Tables by the file that they stand in.
PLACES = {"scaling_tpu_v5e": "docs/scale_out.md", "chaos_cpu": "docs/scale_out.md"}


def main() -> None:
  """Replaces what stands between each pair of markers."""
  for name, make in (
    ("scaling_tpu_v5e", scaling),
    ("chaos_cpu", chaos),
    ("overhead_cpu", overhead),
    ("peers_cpu", peers),
    ("compiled_h200", compiled),
    ("compiled_tpu_v5e", compiled),
    ("layerwise_cpu", layerwise),
    ("quality_gpt_cpu", quality),
    ("autocast_memory_h200", autocast_memory),
    ("autocast_memory_tpu_v5e", autocast_memory),
    ("autocast_time_cpu", autocast_time),
    ("autocast_trace_h200", autocast_trace),
    ("fp8_h200_triton", fp8_compiled),
    ("fp8_h200_cublas", fp8_compiled),
    ("fp8_h200_saved_compute", fp8_compiled),
    ("fp8_h200_saved_fp8", fp8_compiled),
    ("quality_fp8_cpu", quality),
    ("numerics_memory_h200", numerics_memory),
    ("numerics_memory_v5e", numerics_memory),
    ("numerics_time_cpu", numerics_time),
    ("plan_accuracy_h200", plan_accuracy),
    ("plan_accuracy_tpu_v5e", plan_accuracy),
    ("plan_accuracy_cpu", plan_accuracy),
  ):
    file = FOLDER.parent / PLACES.get(name, "benchmarks/README.md")
    text = file.read_text()
    table = make(json.loads((FOLDER / "results" / f"{name}.json").read_text()))
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    text = re.sub(pattern, lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)
    file.write_text(text)


if __name__ == "__main__":
  main()
