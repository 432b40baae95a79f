"""The analytic plan of memory and time beside a compiler's: training steps of four models by size.

The steps are those of the configs in configs/ and examples/llama, made larger, on one device. `here` is this
machine's CPU.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks._runner import ROOT, Row, markdown
from mpjax.planner import ARGUMENT_PARTS, Plan, get_target
from mpjax.train import Planner, load_config, load_plugins

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
TARGETS = ("h200", "v5e", "here")
ON_TPU = (("gpt", "small"), ("vit", "small"))  # the others take minutes to compile
POLICIES = ("fp32", "bf16")
_GPT, _VIT, _RESNET = (f"configs/{name}.yaml" for name in ("gpt_stdlib", "vit_digits", "resnet_digits"))
_LLAMA = "examples/llama/llama3_8b.yaml"
# Model and size: file, overrides, batch size.
CASES = {
  ("gpt", "small"): (_GPT, "model.dim=384 model.heads=6 data.seq_len=512", 16),
  ("gpt", "large"): (_GPT, "model.dim=768 model.heads=12 model.layers=12 data.seq_len=1024", 16),
  ("vit", "small"): (_VIT, "model.patch=1 model.dim=192 model.heads=3 model.layers=6", 512),
  ("vit", "large"): (_VIT, "model.patch=1 model.dim=384 model.heads=6 model.layers=6", 512),
  ("resnet", "small"): (_RESNET, "model.width=32 model.stages=[3,4,6]", 4096),
  ("resnet", "large"): (_RESNET, "model.width=64 model.stages=[3,4,6]", 1024),
  ("llama", "small"): (
    _LLAMA,
    "model.dim=512 model.layers=4 model.heads=8 model.kv_heads=2 model.hidden=1408 "
    "data.vocab_size=8192 data.seq_len=512",
    16,
  ),
  ("llama", "large"): (
    _LLAMA,
    "model.dim=1024 model.layers=8 model.heads=16 model.kv_heads=4 model.hidden=2816 "
    "data.vocab_size=8192 data.seq_len=512",
    16,
  ),
}


def rows() -> Iterator[Row]:
  """Every step under both policies, for each target."""
  for (model, size), policy, target in itertools.product(CASES, POLICIES, TARGETS):
    if target == "v5e" and (model, size) not in ON_TPU:
      continue
    facts = {"model": model, "size": size, "policy": policy, "target": target}
    yield Row(facts, functools.partial(figures, **facts))


def plan_of(model: str, size: str, policy: str, target: str, compiled: bool) -> Plan:
  """The plan of a step."""
  load_plugins([str(ROOT / "examples/llama/llama.py")])
  file, overrides, batch = CASES[model, size]
  config = load_config(str(ROOT / file), [*overrides.split(), f"policy={policy}", "mesh.data=1"])
  return Planner(config, get_target(target)).plan(batch=batch, compile=compiled)


def figures(model: str, size: str, policy: str, target: str) -> dict[str, Any]:
  """Peak, bytes of the arguments and seconds of a step, analytic and compiled."""
  analytic, plan = (plan_of(model, size, policy, target, compiled) for compiled in (False, True))
  assert plan.compiled is not None
  arguments = sum(size for part, size in analytic.memory.parts.items() if part in ARGUMENT_PARTS)
  return {
    "peak": {"analytic": analytic.memory.peak, "compiled": plan.compiled.peak},
    "arguments": {"analytic": arguments, "compiled": plan.compiled.arguments},
    "seconds": {
      "analytic": analytic.time and analytic.time.seconds,
      "compiled": plan.time and plan.time.seconds,
    },
    "explained": plan.compiled.explained,
  }


def ratio(row: dict[str, Any], what: str) -> float:
  """An analytic figure over the compiled one."""
  value: float = row[what]["analytic"] / row[what]["compiled"]
  return value


def table(report: dict[str, Any]) -> str:
  """The analytic peak over the compiled one, which is in brackets."""
  found = report["rows"]
  cells = {
    (row["model"], row["size"], row["target"], row["policy"]): (
      f"{ratio(row, 'peak'):.2f} ({row['peak']['compiled'] / 1e9:.2f} GB)"
    )
    for row in found
  }
  columns = list(itertools.product(TARGETS, POLICIES))
  lines = [[" ".join(case), *(cells.get((*case, *column), "-") for column in columns)] for case in CASES]
  equal = sum(ratio(row, "arguments") == 1 for row in found)
  least = min(row["explained"] for row in found)
  times = sorted(ratio(row, "seconds") for row in found if row["seconds"]["compiled"])
  words = (
    f"Bytes of the arguments are equal, analytic and compiled, in {equal} of {len(found)} plans. The parts "
    f"that are read from a compiled program are at least {least:.0%} of its peak."
  )
  if times:
    words += f" Analytic seconds over compiled ones: {times[0]:.2f} to {times[-1]:.2f}, "
    words += f"median {statistics.median(times):.2f}."
  heads = ["step", *(f"{target} {policy}" for target, policy in columns)]
  return "\n".join([markdown(heads, lines), "", words])
