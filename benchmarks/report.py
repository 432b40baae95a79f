"""Writes the tables and pictures of benchmarks/README.md, and some in docs/, from benchmarks/results.

    python -m benchmarks.report

What the suites of scripts/bench.py report they draw themselves: `<suite>_<where>.json` is given to the module
of that name.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
from typing import Any

from benchmarks import _headlines
from benchmarks._record import provenance
from benchmarks.autocast import _ablation
from benchmarks.chaos import _suite as chaos_suite
from benchmarks.fp8 import _tables as fp8_tables
from benchmarks.gather import _suite as gather_suite
from benchmarks.gpu import _rates as gpu_rates
from benchmarks.gpu import _suite as gpu_suite
from benchmarks.layerwise import _suite as layerwise_suite
from benchmarks.memory import _suite as memory_suite
from benchmarks.mutations import _suite as mutations_suite
from benchmarks.plan import _tables as plan_tables
from benchmarks.quality import _tables as quality_tables
from benchmarks.step_time import _published as step_time_published
from benchmarks.step_time import _six as step_time_six
from benchmarks.tune import _suite as tune_suite
from mpjax._render.picture_style import save_figure

FOLDER = pathlib.Path(__file__).parent
SOME_LAYERS = (0, 4, 8, 12, 16, 20, 24, 28, 31)


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


def compiled(report: dict[str, Any]) -> str:
  """Memory of the step with a loss scale beside that without."""
  lines = [
    "| compute dtype | rows | temporaries MB: bare | scaled | gradients alone | donated | bytes / bare: "
    "scaled | gradients alone | instructions |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    bare, scaled, alone = row["bare"], row["mpjax.dynamic_loss_scale"], row["gradients alone"]
    accessed = [
      f"{of['bytes_accessed'] / bare['bytes_accessed']:.2f}" if bare["bytes_accessed"] else "-"
      for of in (scaled, alone)
    ]
    aliased = "all reused" if scaled["alias_bytes"] >= scaled["donated_array_bytes"] else "not all reused"
    memory = " | ".join(f"{of['temp_bytes'] / 1e6:.1f}" for of in (bare, scaled, alone))
    lines.append(
      f"| {row['dtype']} | {row['batch']} | {memory} | {aliased} | {' | '.join(accessed)} | "
      f"{scaled['ops'] / bare['ops']:.2f}x |"
    )
  return "\n".join([*lines, "", provenance(report)])


def layerwise(report: dict[str, Any]) -> str:
  """Share of zeros by layer and scale, also as a picture for docs/, and the losses after training."""
  save_figure(layerwise_suite.picture(report["gradients"]), FOLDER.parent / "docs" / "layerwise.png")
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


DEVICES = ("h200", "h200_cublas", "b200", "tpu7x", "v5e", "v5p", "v6e")


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


def numerics_inspect(report: dict[str, Any]) -> str:
  """Time of inspections beside that of steps, the first and again."""
  lines = [
    "| layers | first step s | first inspection s | ratio | step ms | gradients ms | inspection ms | ratio |",
    "|---" * 8 + "|",
  ]
  for row in report["rows"]:
    step, both, look = (1e3 * row[f"{name}_s"] for name in ("step", "gradients", "look"))
    lines.append(
      f"| {row['layers']} | {row['first_step_s']:.1f} | {row['first_look_s']:.1f} | {row['first']:.1f} | "
      f"{step:.0f} | {both:.0f} | {look:.0f} | {row['again']:.1f} |"
    )
  return "\n".join([*lines, "", provenance(report)])


def few_bytes_memory(report: dict[str, Any]) -> str:
  """Bytes a parameter of an update: what is held, temporary and accessed."""
  lines = ["| update | held | temporary | accessed |", "|---" * 4 + "|"]
  lines += [
    f"| {row['name']} | {row['held']:.2f} | {row['temporaries']:.2f} | {row['accessed']:.1f} |"
    for row in report["rows"]
  ]
  return "\n".join([*lines, "", provenance(report)])


def few_bytes_step(report: dict[str, Any]) -> str:
  """Bytes a parameter of a whole step: what is held, temporary and its peak."""
  lines = ["| policy | recompute | held | temporary | of bf16's | peak |", "|---" * 6 + "|"]
  lines += [
    f"| {row['policy']} | {row['recompute']} | {row['held']:.2f} | {row['temporaries']:.2f} | "
    f"{row['ratio']:.2f} | {row['peak']:.2f} |"
    for row in report["rows"]
  ]
  return "\n".join([*lines, "", provenance(report)])


def large_vocabulary_memory(report: dict[str, Any]) -> str:
  """Temporaries of the loss and its gradients, whole and in chunks of rows."""
  lines = [
    "| policy | width | loss | temporaries MB | beside the kernel's, of whole logits' | FLOPs |",
    "|---" * 6 + "|",
  ]
  lines += [
    f"| {row['policy']} | {row['width']} | {row['name']} | {row['temp_bytes'] / 1e6:.0f} | "
    f"{_beside(row)} | {row['flops_ratio']:.2f} |"
    for row in report["rows"]
  ]
  return "\n".join([*lines, "", provenance(report)])


def _beside(row: dict[str, Any]) -> str:
  return "-" if row["name"] == "whole logits" else f"{row['ratio']:.3f}"


def large_vocabulary_errors(report: dict[str, Any]) -> str:
  """Relative errors of the loss and its gradients against float64."""
  lines = ["| policy | loss | value | gradient of x | of the kernel |", "|---" * 5 + "|"]
  lines += [
    f"| {row['policy']} | {row['name']} | {row['loss']:.1e} | {row['x']:.1e} | {row['kernel']:.1e} |"
    for row in report["errors"]
  ]
  return "\n".join([*lines, "", provenance(report)])


def large_vocabulary_time(report: dict[str, Any]) -> str:
  """Time of the loss and its gradients on a CPU."""
  lines = ["| policy | loss | seconds | ratio of the medians | of the shortest |", "|---" * 5 + "|"]
  lines += [
    f"| {row['policy']} | {row['name']} | {row['least_s']:.2f} | {row['ratio']:.2f} | "
    f"{row['least_ratio']:.2f} |"
    for row in report["times"]
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
    mesh += ", gather block" if row["mesh"] == "block" else ""
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


SUITES = ("overhead", "memory", "quality", "gpu")


def suites() -> None:
  """Tables and pictures of the suites' reports; a picture stands above its table."""
  readme = FOLDER / "README.md"
  for suite in SUITES:
    tables = "_tables" if suite in ("overhead", "quality") else "_suite"
    module = importlib.import_module(f"benchmarks.{suite}.{tables}")
    for path in sorted((FOLDER / "results").glob(f"{suite}_*.json")):
      report = json.loads(path.read_text())
      if "command" not in report or path.stem in OWN:
        continue
      shown = []
      for name, figure in module.pictures(report).items():
        file = f"{name or path.stem}.png"
        _save(figure, file)
        shown.append(f"![{suite}: {path.stem}](pictures/{file})")
      put(readme, path.stem, "\n\n".join([*shown, module.tables(report)]))


def headlines() -> None:
  """The first table and picture of docs/benchmarks.md, which README.md shows, too."""
  rows = _headlines.headlines()
  put(FOLDER.parent / "docs" / "benchmarks.md", "headlines", _headlines.table(rows))
  _save(_headlines.picture(rows), "headlines.png")


def _save(figure: Any, name: str) -> None:
  (FOLDER / "pictures").mkdir(exist_ok=True)
  save_figure(figure, FOLDER / "pictures" / name)


def put(file: pathlib.Path, name: str, table: str) -> None:
  """Replaces what stands between a pair of markers."""
  text = file.read_text()
  pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
  if not re.search(pattern, text, re.DOTALL):
    raise SystemExit(f"{file}: no place for {name}: expected <!-- {name} --> and <!-- end -->")
  file.write_text(re.sub(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL))


# Reports whose names begin like a suite's, and that have no pictures.
OWN = (
  "quality_recipes_cpu",
  "quality_few_bytes_cpu",
  "memory_h200_jax_0_12",
  "gpu_h200_124m",
  "gpu_h200_1b",
)


def main() -> None:
  """Writes them all."""
  for name, make in (
    ("scaling_tpu_v5e", scaling),
    ("chaos_cpu", chaos_suite.table),
    ("mutations", lambda report: mutations_suite.table(report["before"], report["after"])),
    ("gather_v5e", gather_suite.table),
    ("gather_h200", gather_suite.table),
    ("gather_large", gather_suite.table_of_large),
    ("gather_gspmd", gather_suite.table_of_gspmd),
    ("step_time_published", step_time_published.table),
    ("rates_h100", gpu_rates.table),
    ("step_time_six_h100", step_time_six.table),
    ("compiled_h200", compiled),
    ("compiled_tpu_v5e", compiled),
    ("tune_search", tune_suite.table),
    ("layerwise_cpu", layerwise),
    ("autocast_memory_h200", autocast_memory),
    ("autocast_memory_tpu_v5e", autocast_memory),
    ("autocast_ablation_cuda", _ablation.table),
    ("autocast_ablation_tpu", _ablation.table),
    *((f"fp8_devices_{target}", fp8_tables.by_device) for target in DEVICES),
    ("quality_recipes_cpu", quality_tables.tables),
    ("quality_few_bytes_cpu", quality_tables.tables),
    ("memory_h200_jax_0_12", memory_suite.tables),
    ("numerics_memory_h200", numerics_memory),
    ("numerics_memory_v5e", numerics_memory),
    ("numerics_time_cpu", numerics_time),
    ("numerics_inspect_cpu", numerics_inspect),
    ("few_bytes_memory_h200", few_bytes_memory),
    ("few_bytes_memory_v5e", few_bytes_memory),
    ("few_bytes_step_h200", few_bytes_step),
    ("large_vocabulary_memory_h200", large_vocabulary_memory),
    ("large_vocabulary_memory_v5e", large_vocabulary_memory),
    ("large_vocabulary_errors_cpu", large_vocabulary_errors),
    ("large_vocabulary_time_cpu", large_vocabulary_time),
    ("gpu_h200_124m", gpu_suite.tables),
    ("gpu_h200_1b", gpu_suite.tables),
    ("train_h200", quality),
    ("plan_h200_gpu_suite", plan_tables.beside_steps),
    ("plan_accuracy_h200", plan_tables.accuracy),
    ("plan_accuracy_tpu_v5e", plan_tables.accuracy),
    ("plan_accuracy_cpu", plan_tables.accuracy),
    ("plan_accuracy_h200_jax_0_12", plan_tables.accuracy),
    ("plan_accuracy_cpu_jax_0_12", plan_tables.accuracy),
  ):
    table = make(json.loads((FOLDER / "results" / f"{name}.json").read_text()))
    put(FOLDER / "README.md", name, table)
  headlines()
  suites()


if __name__ == "__main__":
  main()
