"""The memory that plans predict against what steps take on this machine's GPU: five configs, error under 5%.

    python scripts/bench.py plan_measured [--only NAME,...] [--json FILE]

Predicted: the peak of `Planner.plan` with target `here`, compiled by this GPU's own compiler, and with the
described target of the same name where its packages are. Measured: `peak_bytes_in_use` of JAX's allocator
after three steps, without preallocation. Each is a process of its own. Memory that was in use before the
first step (initialisation, the compiler's trials of kernels) is reported too, and has to be below the peak.
Exits with status 1 if the plan of `here` is off by 5% or more, and with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # read when JAX starts, here and in the workers

import jax
import numpy as np

from benchmarks._record import origin, write
from benchmarks._worker import Worker, serve
from mpjax.planner import get_target, missing, target_names
from mpjax.train import Config, Planner, load_config, make_setup

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
STEPS, SECONDS, MOST_ERROR = 3, 900, 0.05
GPT = ["model.dim=768", "model.heads=12", "model.layers=12", "data.seq_len=1024"]
VIT = ["model.patch=1", "model.dim=768", "model.heads=12", "model.layers=12"]
RESNET = ["model.width=128", "model.stages=[3,4,6]"]
# Name: file, overrides, batch size.
CASES: dict[str, tuple[str, list[str], int]] = {
  "gpt bf16": ("gpt_stdlib", [*GPT, "policy=bf16"], 32),
  "gpt fp32": ("gpt_stdlib", [*GPT, "policy=fp32"], 32),
  "vit bf16": ("vit_digits", [*VIT, "policy=bf16"], 1024),
  "resnet bf16": ("resnet_digits", [*RESNET, "policy=bf16"], 4096),
  "gpt fp8": ("gpt_stdlib", [*GPT, "policy=fp8"], 32),
}


def config_of(name: str) -> tuple[Config, int]:
  """The config and batch size of a case."""
  file, overrides, batch = CASES[name]
  return load_config(str(CONFIGS / f"{file}.yaml"), [*overrides, "mesh.data=1"]), batch


def predict(name: str, target: str) -> dict[str, Any]:
  """What the plan of a case says."""
  config, batch = config_of(name)
  plan = Planner(config, get_target(target)).plan(batch=batch, compile=True)
  assert plan.compiled is not None
  return {
    "peak": plan.compiled.peak,
    "analytic": plan.memory.peak,
    "parts": plan.compiled.memory.parts,
    "explained": plan.compiled.explained,
  }


def take(name: str) -> dict[str, Any]:
  """What three steps of a case take."""
  config, batch = config_of(name)
  setup = make_setup(config)
  state = setup.first_state()
  # The data may have fewer rows than that.
  rows = next(setup.data.train())
  placed = jax.device_put(jax.tree.map(lambda x: np.resize(x, (batch, *np.shape(x)[1:])), rows))
  setup.step.jitted.lower(state, placed).compile()
  device = jax.devices()[0]
  before = device.memory_stats()["peak_bytes_in_use"]
  losses = []
  for _ in range(STEPS):
    state, metrics = jax.block_until_ready(setup.step(state, placed))
    losses.append(float(metrics["loss"]))
  return {"peak": device.memory_stats()["peak_bytes_in_use"], "before": before, "losses": losses}


def start(task: dict[str, Any]) -> tuple[dict[str, Any], Any]:
  """A worker's answer, which is all that it has to say."""
  found = take(task["name"]) if task["target"] is None else predict(task["name"], task["target"])
  return found, dict


def ask(name: str, target: str | None) -> dict[str, Any]:
  """The answer of a fresh process."""
  task = {"name": name, "target": target}
  with contextlib.closing(Worker(sys.executable, "benchmarks.plan._measured", task, {})) as worker:
    return worker.read(SECONDS)


def described_here() -> str | None:
  """The described target that this machine's GPU is, if its packages are installed."""
  published = lambda target: (target.memory, target.bandwidth, target.flops, target.cuda)
  here = published(get_target("here"))
  name = next((name for name in target_names()[1:] if published(get_target(name)) == here), None)
  return name if name and not missing(get_target(name)) else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--only", default=",".join(CASES))


def run(options: argparse.Namespace) -> int:
  if jax.devices()[0].platform not in ("gpu", "cuda", "rocm"):
    print(f"a plan is measured on a GPU, and JAX finds {jax.devices()[0].device_kind} here", file=sys.stderr)
    return 2
  described = described_here()
  report: dict[str, Any] = origin("plan_measured", "flax", "optax") | {"described": described, "rows": []}
  good = True
  print(f"{'':14}{'measured MB':>13}{'here MB':>11}{'ratio':>8}{'described':>13}{'ratio':>8}{'analytic':>10}")
  for name in options.only.split(","):
    row: dict[str, Any] = {"name": name, "measured": ask(name, None), "here": ask(name, "here")}
    if described:
      row["described"] = ask(name, described)
    report["rows"].append(row)
    good &= show(row)
    write(report, options.json)
  return 0 if good else 1


def show(row: dict[str, Any]) -> bool:
  """One line of the table, and whether the plan of `here` is good."""
  errors = [f"{key}: {value['error']}" for key, value in row.items() if "error" in value]
  if "error" in row["measured"] or "error" in row["here"]:
    print(f"{row['name']:14}{'; '.join(errors)}", flush=True)
    return False
  peak = row["measured"]["peak"]
  cells: list[str] = []
  for key in ("here", "described"):
    figure = row.get(key, {}).get("peak")
    row[f"{key}_ratio"] = figure / peak if figure else None
    cells += [f"{figure / 1e6:.1f}", f"{figure / peak:.3f}"] if figure else ["-", "-"]
  good = abs(row["here_ratio"] - 1) < MOST_ERROR and row["measured"]["before"] < peak
  shown = f"{row['name']:14}{peak / 1e6:13.1f}{cells[0]:>11}{cells[1]:>8}{cells[2]:>13}{cells[3]:>8}"
  note = "; ".join(errors) or ("" if good else "<- fails")
  print(f"{shown}{row['here']['analytic'] / peak:10.3f}  {note}", flush=True)
  return good


if __name__ == "__main__":
  serve(start)
