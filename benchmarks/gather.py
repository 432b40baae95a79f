"""When divided parameters are gathered: memory and traffic of a step on many devices, by a plan of each.

`step`: once a step, and kept. `block`: each where it is read, and again in the backward pass. Compiled: the
Llama of examples/llama, 1.1B parameters, whose layers are a scan and are computed again, and the built-in
GPT, 0.9B, whose layers stand one after another; 1024 tokens a device and micro-batch. Planned: Llama 3 (arXiv
2407.21783, table 3), 8192 tokens a device. AdamW, bf16, parameters over all devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks._runner import ROOT, Row, markdown, one, plan_figures
from mpjax.planner import Plan, get_target
from mpjax.train import Planner, load_config, load_plugins

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
GATHERS = ("step", "block")
TARGETS = ("h200:8", "v5e:2x4")
MODELS: dict[str, dict[str, Any]] = {
  "llama": {"kind": "llama", "dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192},
  "gpt": {"kind": "gpt", "dim": 2048, "layers": 16, "heads": 16},
}
CASES = (("llama", 1), ("llama", 4), ("gpt", 1))  # with how many micro-batches
RECOMPUTE = {"llama": "blocks", "gpt": "islands"}
LARGE: dict[str, dict[str, Any]] = {
  "8B": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336},
  "70B": {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
}
ON = (("8B", "v5e:16x16"), ("70B", "v5e:16x16"), ("70B", "v5p:4x4x4"), ("70B", "h100:8x8"))


def rows() -> Iterator[Row]:
  """The compiled steps, then the planned ones."""
  for target, (model, accumulate), gather in itertools.product(TARGETS, CASES, GATHERS):
    facts = {"target": target, "model": model, "accumulate": accumulate, "gather": gather}
    yield Row(facts, functools.partial(compiled, target, model, accumulate, gather))
  for (model, target), gather in itertools.product(ON, GATHERS):
    facts = {"target": target, "model": model, "accumulate": 1, "gather": gather}
    yield Row(facts, functools.partial(planned, target, model, gather))


def compiled(target: str, model: str, accumulate: int, gather: str) -> dict[str, Any]:
  """What a step takes and sends, by the compiler."""
  devices = get_target(target).devices
  data = {"vocab_size": 32768, "seq_len": 1024, "batch_size": accumulate * devices}
  mesh = {"fsdp": devices, "gather": gather}
  train = {"recompute": RECOMPUTE[model], "accumulate": accumulate}
  return plan_figures(plan(target, "bf16", MODELS[model], data, mesh, train, compile=True))


def planned(target: str, model: str, gather: str) -> dict[str, Any]:
  """What a step of Llama 3 takes, without a compiler."""
  devices = get_target(target).devices
  data = {"vocab_size": 128256, "seq_len": 8192, "batch_size": devices}
  mesh = {"fsdp": devices, "gather": gather}
  llama = {"kind": "llama", "theta": 500000.0} | LARGE[model]
  made = plan(target, "bf16", llama, data, mesh, {"recompute": "blocks"}, compile=False)
  return {"peak": made.memory.peak, "usable": made.usable_memory}


def plan(
  target: str,
  policy: Any,
  model: dict[str, Any],
  data: dict[str, Any],
  mesh: dict[str, Any],
  train: dict[str, Any],
  compile: bool,
) -> Plan:
  """The plan of a config on random tokens with AdamW."""
  load_plugins([str(ROOT / "examples" / "llama" / "llama.py")])  # the Llama, and the tokens
  config = {
    "policy": policy,
    "model": model,
    "data": {"kind": "random_tokens"} | data,
    "optimizer": {"name": "adamw", "learning_rate": 3e-4, "options": {"b2": 0.95}},
    "mesh": {"data": 1} | mesh,
    "train": {"steps": 10} | train,
  }
  return Planner(load_config(config), get_target(target)).plan(compile=compile)


def gathered_bytes(row: dict[str, Any]) -> int:
  """Bytes that all-gathers make on a device."""
  return sum(found["bytes"] for found in row["collectives"] if found["operation"] == "all-gather")


def table(report: dict[str, Any]) -> str:
  """Peaks of both settings, compiled with what is gathered, and planned."""
  lines = []
  for target, (model, accumulate) in itertools.product(TARGETS, CASES):
    both = [one(report, target=target, model=model, accumulate=accumulate, gather=name) for name in GATHERS]
    moved = [gathered_bytes(row) for row in both]
    cells = [f"{row['peak'] / 1e9:.2f}" for row in both] + [f"{both[1]['peak'] / both[0]['peak']:.2f}"]
    cells += [*(f"{size / 1e9:.2f}" for size in moved), f"{moved[1] / moved[0]:.1f}"]
    lines.append([model, target, accumulate, *cells])
  heads = ["model", "devices", "micro-batches", "peak GB, step", "block", "ratio"]
  compiled = markdown([*heads, "gathered GB, step", "block", "ratio"], lines)
  lines = []
  for model, target in ON:
    both = [one(report, target=target, model=model, gather=name) for name in GATHERS]
    lines.append(
      [model, target, *(f"{row['peak'] / 1e9:.1f}" for row in both), f"{both[0]['usable'] / 1e9:.1f}"]
    )
  planned = markdown(["Llama 3", "devices", "peak GB, step", "block", "memory for JAX"], lines)
  return f"{compiled}\n\n{planned}"
