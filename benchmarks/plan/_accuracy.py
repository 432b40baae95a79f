"""How close the analytic plan of memory is to what a target's compiler says, on four models in three sizes.

    python scripts/bench.py plan [--target here|v5e|h200|...] [--models gpt,vit,resnet,llama]
      [--sizes small,medium,large] [--policies fp32,bf16] [--json FILE]

The training steps of the configs in configs/ and examples/llama, on one device, with overrides that make them
larger or smaller. Arguments: the bytes of weights, optimiser state and batch, padding included, which have to
be what the compiler says. Outputs: the bytes of the step's results and of the table of pointers to them,
likewise. Peak: analytic by compiled. Explained: the share of the compiled peak that the plan's parts account
for. Exits with status 1 if arguments or outputs differ, or less than 90% is explained. Targets other than
`here` need the packages that `mpjax[plan-tpu]` and `mpjax[plan-cuda]` name, and no such device.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from typing import Any

# Read when JAX starts: what is compiled for another device is compiled in a process of its own.
if "here" not in sys.argv and any(word.startswith("--target") for word in sys.argv):
  os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks._record import origin, write
from mpjax.planner import ARGUMENT_PARTS, CompileError, Plan, Target, get_target, missing, tiled_bytes
from mpjax.planner.analytic import table_bytes
from mpjax.train import Planner, load_config, load_plugins, make_setup

ROOT = pathlib.Path(__file__).parents[2]
LEAST_EXPLAINED = 0.90


def _llama(width: int, layers: int, length: int, batch: int) -> tuple[str, list[str], int]:
  sizes = {"dim": width, "layers": layers, "heads": width // 64, "kv_heads": width // 256}
  sizes |= {"hidden": width * 11 // 4}
  given = [f"model.{key}={size}" for key, size in sizes.items()]
  return "examples/llama/llama3_8b.yaml", [*given, "data.vocab_size=8192", f"data.seq_len={length}"], batch


# Model and size: file, overrides, batch size.
CASES: dict[tuple[str, str], tuple[str, list[str], int]] = {
  ("gpt", "small"): ("configs/gpt_stdlib.yaml", ["model.dim=384", "model.heads=6", "data.seq_len=512"], 16),
  ("gpt", "medium"): (
    "configs/gpt_stdlib.yaml",
    ["model.dim=512", "model.heads=8", "model.layers=6", "data.seq_len=512"],
    32,
  ),
  ("gpt", "large"): (
    "configs/gpt_stdlib.yaml",
    ["model.dim=768", "model.heads=12", "model.layers=12", "data.seq_len=1024"],
    16,
  ),
  ("vit", "small"): (
    "configs/vit_digits.yaml",
    ["model.patch=1", "model.dim=192", "model.heads=3", "model.layers=6"],
    512,
  ),
  ("vit", "medium"): (
    "configs/vit_digits.yaml",
    ["model.patch=1", "model.dim=384", "model.heads=6", "model.layers=6"],
    512,
  ),
  ("vit", "large"): (
    "configs/vit_digits.yaml",
    ["model.patch=1", "model.dim=768", "model.heads=12", "model.layers=12"],
    1024,
  ),
  ("resnet", "small"): ("configs/resnet_digits.yaml", ["model.width=32", "model.stages=[3,4,6]"], 4096),
  ("resnet", "medium"): ("configs/resnet_digits.yaml", ["model.width=64", "model.stages=[3,4,6]"], 1024),
  ("resnet", "large"): ("configs/resnet_digits.yaml", ["model.width=128", "model.stages=[3,4,6]"], 4096),
  ("llama", "small"): _llama(512, 4, 512, 16),
  ("llama", "medium"): _llama(1024, 8, 512, 16),
  ("llama", "large"): _llama(2048, 16, 1024, 8),
}


def result_bytes(step: Any, args: tuple[Any, ...], kind: str) -> int:
  """Bytes that a step returns, one by one and with the table of pointers; no batch size changes them."""
  results = jax.tree.leaves(jax.eval_shape(step, *args))
  return sum(_leaf_bytes(leaf, kind) for leaf in results) + table_bytes(len(results), kind)


def _leaf_bytes(leaf: Any, kind: str) -> int:
  data = (
    jax.eval_shape(jax.random.key_data, leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    else leaf
  )
  if kind == "tpu":
    return tiled_bytes(data.shape, data.dtype)
  return int(np.prod(data.shape, dtype=np.int64)) * data.dtype.itemsize


def measure(model: str, size: str, policy: str, target: Target) -> dict[str, Any]:
  """The row of a model, size and policy."""
  name, overrides, batch = CASES[model, size]
  given = [*overrides, f"policy={policy}", "mesh.data=1"]
  config = load_config(str(ROOT / name), given)
  row = {"model": model, "size": size, "policy": policy, "batch": batch, "overrides": overrides}
  planner = Planner(config, target)
  start = time.perf_counter()
  analytic = planner.plan(batch=batch, compile=False)
  row["analytic_seconds"] = time.perf_counter() - start
  try:
    plan = planner.plan(batch=batch, compile=True)
  except CompileError as error:
    return row | {"error": str(error)}
  setup = make_setup(config)
  results = result_bytes(setup.step, (setup.abstract_state(), next(setup.data.train())), target.kind)
  return row | _figures(analytic, plan, results)


def _figures(analytic: Plan, plan: Plan, results: int) -> dict[str, Any]:
  compiled = plan.compiled
  assert compiled is not None
  arguments = sum(n for part, n in analytic.memory.parts.items() if part in ARGUMENT_PARTS)
  return {
    "parameters": plan.parameters,
    "arguments": {"analytic": arguments, "compiled": compiled.arguments},
    "outputs": {"analytic": results, "compiled": compiled.outputs},
    "peak": {"analytic": analytic.memory.peak, "compiled": compiled.peak},
    "peak_ratio": analytic.memory.peak / compiled.peak,
    "seconds": {
      "traced": analytic.time and analytic.time.seconds,
      "compiled": plan.time and plan.time.seconds,
    },
    "explained": compiled.explained,
    "parts": {"analytic": analytic.memory.parts, "compiled": compiled.memory.parts},
    "compile_seconds": compiled.seconds,
  }


def _seconds(plan: Plan) -> float | None:
  return plan.time.seconds if plan.time else None


def passes(row: dict[str, Any]) -> bool:
  """Whether a row is as it should be."""
  same = lambda figures: figures["analytic"] == figures["compiled"]
  return (
    "error" not in row
    and same(row["arguments"])
    and same(row["outputs"])
    and row["explained"] >= LEAST_EXPLAINED
  )


def show(row: dict[str, Any]) -> None:
  """One line of the table."""
  title = f"{row['model']} {row['size']} {row['policy']}"
  if "error" in row:
    print(f"{title:20}{row['error']}", flush=True)
    return
  equal = lambda key: "equal" if row[key]["analytic"] == row[key]["compiled"] else "DIFFERS"
  sizes = (row["parameters"] / 1e6, row["arguments"]["compiled"] / 1e6)
  peaks = (row["peak"]["analytic"] / 1e6, row["peak"]["compiled"] / 1e6)
  print(
    f"{title:20}{sizes[0]:9.2f}{sizes[1]:10.2f}{equal('arguments'):>9}{equal('outputs'):>9}"
    f"{peaks[0]:13.1f}{peaks[1]:11.1f}{row['peak_ratio']:7.3f}{row['explained']:10.3f}"
    f"{row['analytic_seconds']:11.2f}{row['compile_seconds']:10.1f}{'' if passes(row) else '  <- fails'}",
    flush=True,
  )


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--target", default="here")
  parser.add_argument("--models", default="gpt,vit,resnet,llama")
  parser.add_argument("--sizes", default="small,medium,large")
  parser.add_argument("--policies", default="fp32,bf16")


def run(options: argparse.Namespace) -> int:
  target = get_target(options.target)
  if lacks := missing(target):
    print(lacks, file=sys.stderr)
    return 2
  packages = (
    {"tpu": ["libtpu"], "gpu": ["jax-cuda13-plugin"]}.get(target.kind, []) if not target.is_here else []
  )
  shown = target.device if target.is_here else f"{target.device}, described and not there"
  given = f" --target {options.target}"
  load_plugins([str(ROOT / "examples/llama/llama.py")])
  report = origin(f"plan{given}", "flax", "optax", *packages, device=shown) | {"rows": []}
  print(
    f"{'':20}{'M params':>9}{'args MB':>10}{'args':>9}{'outputs':>9}{'analytic MB':>13}{'peak MB':>11}"
    f"{'ratio':>7}{'explained':>10}{'analytic s':>11}{'compile s':>10}"
  )
  for model in options.models.split(","):
    for size in options.sizes.split(","):
      for policy in options.policies.split(","):
        row = measure(model, size, policy, target)
        report["rows"].append(row)
        show(row)
        write(report, options.json)
        jax.clear_caches()
  good = sum(passes(row) for row in report["rows"])
  print(
    f"{good} of {len(report['rows'])} with equal arguments and outputs and {LEAST_EXPLAINED:.0%} explained"
  )
  return 0 if good == len(report["rows"]) else 1
