"""What a search for a policy chooses for the example configs on an H200, an L4, a TPU v5e and eight H200s.

The search begins after ten steps in float32, and measures errors on two batches.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks._runner import ROOT, Row, markdown
from mpjax.planner import get_target
from mpjax.train import Config, Planner, load_config, load_plugins, make_setup
from mpjax.tuning import tune

PACKAGES = ("flax", "optax")
TARGETS = ("h200", "l4", "v5e", "h200:8")
STEPS, BATCHES = 10, 2
LLAMA = ROOT / "examples" / "llama"
CONFIGS = {
  "gpt_stdlib": "gpt_stdlib",
  "llama stdlib": str(LLAMA / "stdlib.yaml"),
  "vit_digits": "vit_digits",
  "resnet_digits": "resnet_digits",
}


def rows() -> Iterator[Row]:
  """A config with its searches for all targets."""
  for config in CONFIGS:
    yield Row({"config": config}, functools.partial(searches, config))


def searches(name: str) -> dict[str, Any]:
  """What is chosen for each target."""
  load_plugins([str(LLAMA / "llama.py")])
  config = load_config(CONFIGS[name], ["policy=fp32"])
  setup = make_setup(config)
  state, data = setup.first_state(), setup.data.train()
  for batch in itertools.islice(data, STEPS):
    state, _ = setup.step(state, setup.place(batch))
  batches = [setup.place(batch) for batch in itertools.islice(data, BATCHES)]
  search_for = functools.partial(search, config, setup.step, state, batches)
  return {"targets": {target: search_for(target) for target in TARGETS}}


def search(config: Config, step: Any, state: Any, batches: Any, target: str) -> Any:
  """What a search for a target chooses."""
  layout = Planner(config, get_target(target)).layout
  began = time.perf_counter()
  result = tune(step.with_layout(layout), state, batches, target=target)
  return {
    "chosen": result.chosen.label,
    "error": result.chosen.error.total,
    "tolerance": result.tolerance,
    "estimated_s": {trial.label: trial.cost.seconds for trial in result.table},
    "search_s": time.perf_counter() - began,
  }


def table(report: dict[str, Any]) -> str:
  """The choice for each target, and the estimated times of FP8 and float32 over bfloat16's."""
  lines = []
  for row in report["rows"]:
    cells = []
    for found in row["targets"].values():
      seconds = found["estimated_s"]
      fp8, fp32 = (seconds[policy] / seconds["bf16"] for policy in ("fp8", "fp32"))
      cells.append(f"{found['chosen']} ({fp8:.2f}, {fp32:.2f})")
    first = row["targets"][TARGETS[0]]
    lines.append([row["config"], *cells, f"{first['error']:.2%}", f"{first['tolerance']:.2%}"])
  return markdown(["config", *TARGETS, f"error ({TARGETS[0]})", "tolerance"], lines)
