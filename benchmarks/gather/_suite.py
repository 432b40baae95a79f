"""When divided parameters are gathered, compiled: memory and collectives of a step, by a described device.

    python scripts/bench.py gather TARGET [--models llama,gpt] [--accumulate 1,4] [--policies bf16]
      [--json FILE]

TARGET is one of `v5e:2x4` and `h200:8`, which need not be there; or `large`, for Llama 3 of 8B and 70B on
larger ones, of which one is compiled too: a sequence of 8192 tokens a device; or `gspmd`, for a step of a
user's own under `jax.jit`, compiled for v5e:4x4, whose parameters the compiler gathers. The other models have
16 layers of 2048: the Llama of `examples/llama`, 1.1B parameters, whose layers are a scan and are computed
again in the backward pass; and the built-in GPT, 0.9B, whose layers stand one after another. AdamW,
parameters over `fsdp: 8`, `--rows` sequences of 1024 tokens a device and micro-batch. `step`: parameters are
gathered once a step and kept. `block`: each where it is read, and again in the backward pass.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys
from typing import Any

# Read when JAX starts: programs for described devices are compiled in processes of their own.
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks._record import origin, provenance, write
from benchmarks.gather import _gspmd
from mpjax.planner import Plan, get_target, missing
from mpjax.train import Planner, load_config, load_plugins

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLUGIN = ROOT / "examples" / "llama" / "llama.py"
DEVICES = 8
MODELS: dict[str, dict[str, Any]] = {
  "llama": {"kind": "llama", "dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192},
  "gpt": {"kind": "gpt", "dim": 2048, "layers": 16, "heads": 16},
}
# Llama 3 (arXiv 2407.21783, table 3).
LARGE: dict[str, dict[str, Any]] = {
  "8B": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336},
  "70B": {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
}
COMPILED = ("8B", "v5e:16x16", "block")
TARGETS = ("v5e:16x16", "v5p:4x4x4", "h100:8x8")
RECOMPUTE = {"llama": "blocks", "gpt": "islands"}


def measure(target: str, model: str, policy: Any, gather: str, accumulate: int, rows: int) -> dict[str, Any]:
  """Returns the row of a model and a way to gather."""
  config = {
    "policy": policy,
    "model": MODELS[model],
    "data": {"kind": "random_tokens", "vocab_size": 32768, "seq_len": 1024}
    | {"batch_size": rows * DEVICES * accumulate},
    "optimizer": {"name": "adamw", "learning_rate": 3e-4, "options": {"b2": 0.95}},
    "mesh": {"fsdp": DEVICES, "data": 1, "gather": gather},
    "train": {"steps": 10, "recompute": RECOMPUTE[model], "accumulate": accumulate},
  }
  plan = Planner(load_config(config), get_target(target)).plan(compile=True)
  return {"model": model, "policy": policy, "gather": gather, "accumulate": accumulate} | _figures(plan)


def _figures(plan: Plan) -> dict[str, Any]:
  compiled = plan.compiled
  assert compiled is not None
  return {
    "parameters": plan.parameters,
    "arguments": compiled.arguments,
    "temporaries": compiled.temporaries,
    "peak": compiled.peak,
    "analytic_peak": plan.memory.peak,
    "gathered": plan.memory.gathered,
    "collectives": [
      {"operation": c.operation, "dtype": c.dtype, "bytes": c.nbytes, "count": c.count}
      for c in plan.collectives
    ],
    "compile_seconds": compiled.seconds,
  }


def measure_large(target: str, model: str, gather: str) -> dict[str, Any]:
  """Returns the row of a large model on all devices of a target; one of them is compiled, too."""
  device = get_target(target)
  config = {
    "policy": "bf16",
    "model": {"kind": "llama", "theta": 500000.0} | LARGE[model],
    "data": {"kind": "random_tokens", "vocab_size": 128256, "seq_len": 8192, "batch_size": device.devices},
    "optimizer": {"name": "adamw", "learning_rate": 3e-4, "options": {"b2": 0.95}},
    "mesh": {"fsdp": device.devices, "data": 1, "gather": gather},
    "train": {"steps": 10, "recompute": "blocks"},
  }
  compile = (model, target, gather) == COMPILED and not missing(device)
  plan = Planner(load_config(config), device).plan(compile=compile)
  parts = plan.memory.parts
  return {
    "model": model,
    "target": target,
    "gather": gather,
    "parameters": plan.parameters,
    "state": sum(parts.get(name, 0) for name in ("master weights", "optimizer state", "other state")),
    "gathered": plan.memory.gathered,
    "peak": plan.memory.peak,
    "usable": plan.usable_memory,
    "compiled_peak": plan.compiled.peak if plan.compiled else None,
  }


def table_of_large(report: dict[str, Any]) -> str:
  """Returns the report on large models as a table."""
  lines = [
    "| model | target | gathered | state GB | at once GB | peak GB | fits | compiled GB |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    memory = " | ".join(f"{row[key] / 1e9:.1f}" for key in ("state", "gathered", "peak"))
    fits = "yes" if row["peak"] <= row["usable"] else f"no: {row['usable'] / 1e9:.1f}"
    compiled = f"{row['compiled_peak'] / 1e9:.1f}" if row.get("compiled_peak") else ""
    lines.append(f"| {row['model']} | {row['target']} | {row['gather']} | {memory} | {fits} | {compiled} |")
  return "\n".join([*lines, "", provenance(report)])


def table_of_gspmd(report: dict[str, Any]) -> str:
  """Returns the report on a step of a user's own as a table."""
  lines = ["| casts | temporaries MB | peak MB | analytic | crossing, MB |", "|---|---|---|---|---|"]
  for row in report["rows"]:
    memory = " | ".join(f"{row[key] / 1e6:.0f}" for key in ("temporaries", "peak"))
    ratio = f"{row['analytic_peak'] / row['peak']:.2f}"
    lines.append(f"| {row['casts']} | {memory} | {ratio} | {_crossing(row)} |")
  return "\n".join([*lines, "", provenance(report)])


def _crossing(row: dict[str, Any]) -> str:
  large = [c for c in row["collectives"] if c["bytes"] > 1e6]
  return ", ".join(f"{c['operation']} {c['dtype']} {c['bytes'] / 1e6:.0f}" for c in large)


def table(report: dict[str, Any]) -> str:
  """Returns the report as a table."""
  lines = [
    "| model | policy | micro-batches | gathered | at once MB | temporaries MB | peak MB | analytic "
    "| crossing, MB |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in report["rows"]:
    memory = " | ".join(f"{row[key] / 1e6:.0f}" for key in ("gathered", "temporaries", "peak"))
    lines.append(
      f"| {row['model']} | {row['policy']} | {row['accumulate']} | {row['gather']} | {memory} | "
      f"{row['analytic_peak'] / row['peak']:.2f} | {_crossing(row)} |"
    )
  return "\n".join([*lines, "", provenance(report)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("target", choices=("v5e:2x4", "h200:8", "large", "gspmd"))
  parser.add_argument("--models", default=",".join(MODELS))
  parser.add_argument("--accumulate", default="1,4")
  parser.add_argument("--policies", default="bf16")
  parser.add_argument("--rows", type=int, default=1, help="sequences of a device in a micro-batch")


def run(options: argparse.Namespace) -> int:
  if options.target == "large":
    load_plugins([str(PLUGIN)])
    report = origin("gather large", "flax", "optax", "libtpu", device="no device")
    choices = itertools.product(LARGE, TARGETS, ("step", "block"))
    report["rows"] = [measure_large(target, model, gather) for model, target, gather in choices]
    print(table_of_large(report))
    write(report, options.json)
    return 0
  of_users = options.target == "gspmd"
  target = get_target(_gspmd.TARGET if of_users else options.target)
  if lacks := missing(target):
    print(lacks, file=sys.stderr)
    return 2
  load_plugins([str(PLUGIN)])
  packages = ("libtpu",) if target.kind == "tpu" else ("jax-cuda13-plugin",)
  name = f"gather {options.target}"
  report = origin(name, "flax", "optax", *packages, device=f"{target.device}, described and not there")
  if of_users:
    report["rows"] = [{"casts": casts} | _figures(_gspmd.plan(casts)) for casts in _gspmd.LOSSES]
    print(table_of_gspmd(report))
    write(report, options.json)
    return 0
  report |= {"models": MODELS, "rows_of_a_device": options.rows, "rows": []}
  for model in options.models.split(","):
    for policy in options.policies.split(","):
      for accumulate in map(int, options.accumulate.split(",")):
        for gather in ("step", "block"):
          row = measure(options.target, model, policy, gather, accumulate, options.rows)
          report["rows"].append(row)
          peaks = f"temporaries {row['temporaries'] / 1e6:.0f} MB, peak {row['peak'] / 1e6:.0f} MB"
          print(f"{model} {policy} x{accumulate} {gather}: {peaks}", flush=True)
          write(report, options.json)
  return 0
