"""Memory of a whole training step, from the compiler of a device that need not be there."""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks._record import origin
from mpjax.planner import get_target
from mpjax.train import Planner, load_config

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "gpt_stdlib.yaml"
# 101 million parameters.
SIZES = ("model.dim=1024", "model.layers=8", "model.heads=8", "data.seq_len=512", "data.batch_size=4")
# Policy and what the backward pass computes again; first what the others are compared with.
STEPS: tuple[tuple[Any, str], ...] = (
  ("bf16", "islands"),
  ({"base": "bf16", "optimizer_dtype": "int8"}, "islands"),
  ("bf16_lean", "islands"),
  ("bf16_lean", "dots"),
)


def measure(target: str) -> dict[str, Any]:
  """Returns the bytes a parameter of each step: state, temporaries and peak, as compiled."""
  described = get_target({"cuda": "h200", "tpu": "v5e"}[target])
  shown = f"{described.device}, described and not there"
  report = origin(f"few_bytes step {target}", "flax", "optax", device=shown)
  planner = Planner(load_config(str(CONFIG), ["mesh.data=1", *SIZES]), described)
  rows: list[dict[str, Any]] = []
  for policy, recompute in STEPS:
    plan = planner.plan(policy, recompute=recompute, compile=True)
    compiled, count = plan.compiled, plan.parameters
    assert compiled is not None
    row: dict[str, Any] = {
      "policy": policy if isinstance(policy, str) else ", ".join(f"{k}: {v}" for k, v in policy.items()),
      "recompute": recompute,
      "held": compiled.arguments / count,
      "temporaries": compiled.temporaries / count,
      "peak": compiled.peak / count,
    }
    row["ratio"] = row["temporaries"] / (rows[0] if rows else row)["temporaries"]
    rows.append(row)
    print(
      f"{row['policy']:32} recompute {recompute:8} temporaries {row['temporaries']:.2f} bytes a parameter, "
      f"{row['ratio']:.2f} of the first",
      flush=True,
    )
  return report | {"config": CONFIG.name, "overrides": list(SIZES), "parameters": count, "rows": rows}
