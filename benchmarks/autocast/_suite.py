"""What `mpjax.autocast` of a plain float32 model costs beside careful casts by hand.

    python scripts/bench.py autocast memory cuda|tpu [--dtype bfloat16|float16] [--json FILE]
    python scripts/bench.py autocast ablation cuda|tpu [--model NAME] [--without MECHANISM] [--json FILE]

`memory` compiles the gradient of the loss of a GPT (768 wide, 4 layers, 512 tokens, batch 16) and of a ViT
(384 wide, 6 layers, 224 x 224, batch 32) for an H200 or a TPU v5e, without the device: temporary memory from
the compiler, and matrix products and convolutions by the dtypes of their operands, from the StableHLO.
`ablation` compiles the gradients of small models of a dozen kinds, under autocast and under autocast without
one of its mechanisms. A described device needs the packages that `mpjax[plan-cuda]` and `mpjax[plan-tpu]`
name. Triton's products are off for the H200: with no GPU to tune them on, XLA finds no tiling for the ViT's
and stops.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
from collections.abc import Callable
from typing import Any

# Read when JAX and the compilers start: a described device is not a backend.
if {"cuda", "tpu"} & {*sys.argv}:
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
if "cuda" in sys.argv:
  ours = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false "
  os.environ["XLA_FLAGS"] = ours + os.environ.get("XLA_FLAGS", "")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks._record import compiler_figures, origin
from benchmarks.autocast import _ablation
from benchmarks.autocast._kinds_of_models import EXAMPLES
from benchmarks.autocast._models import Task, gpt, vit

LARGE = {"GPT": gpt(768, 12, 4, seq=512, batch=16), "ViT": vit(384, 6, 6, side=224, batch=32)}
POLICIES = {"bfloat16": "bf16", "float16": "fp16"}
SAVE_DOTS = jax.checkpoint_policies.dots_saveable

# Name to (task, half-precision dtype) -> loss.
VARIANTS: dict[str, Callable[[Task, str], Callable[[Any, Any], jax.Array]]] = {
  "float32": lambda task, dtype: task.loss(),
  "hand": lambda task, dtype: task.loss(dtype),
  "hand, dots_saveable": lambda task, dtype: jax.checkpoint(task.loss(dtype), policy=SAVE_DOTS),
  "autocast": lambda task, dtype: mpjax.autocast(task.loss(), POLICIES[dtype]),
  "autocast, recompute": lambda task, dtype: mpjax.autocast(task.loss(), POLICIES[dtype], recompute="dots"),
}
ORDER = ("hand", "hand, dots_saveable", "autocast", "autocast, recompute", "float32")


def products(stablehlo: str) -> dict[str, int]:
  """How many matrix products and convolutions take operands of which dtypes."""
  lines = re.findall(r"stablehlo\.(?:dot_general|convolution)\b.*: \((.*?)\) ->", stablehlo)
  dtypes = (" x ".join(re.findall(r"tensor<(?:\d+x)*(\w+)>", operands)) for operands in lines)
  return dict(collections.Counter(dtypes).most_common())


def target_device(target: str) -> Any:
  """The first of a described target's devices."""
  from benchmarks._described import described  # which turns JAX's own backends off: a trace here wants those

  return described(target).devices[0]


def shapes(task: Task, device: Any) -> tuple[Any, Any]:
  """Shapes of parameters and batch on a device."""
  tree = (jax.eval_shape(task.init), {"x": task.x, "y": task.y})
  sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
  return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)


def measure_memory(target: str, dtype: str, names: list[str]) -> dict[str, Any]:
  """Compiles the gradient of every variant, for a device that need not be there."""
  device = target_device(target)
  shown = f"{device.device_kind}, described and not there"
  command = f"autocast memory {target} --dtype {dtype}"
  report = origin(command, "flax", "optax", device=shown) | {"models": {}}
  for model, task in LARGE.items():
    params, batch = shapes(task, device)
    rows = report["models"][model] = {}
    print(f"{f'{model}, {dtype}, {shown}':60}{'temp MB':>9}{'ratio':>9}  products by operands", flush=True)
    for name in names:
      lowered = jax.jit(jax.value_and_grad(VARIANTS[name](task, dtype))).lower(params, batch)
      row = rows[name] = {"products": products(lowered.as_text())} | compiler_figures(lowered.compile())
      row["temp_ratio"] = row["temp_bytes"] / rows[names[0]]["temp_bytes"]
      counts = ", ".join(f"{count} {operands}" for operands, count in row["products"].items())
      print(f"  {name:58}{row['temp_bytes'] / 1e6:9.1f}{row['temp_ratio']:9.3f}  {counts}", flush=True)
  return report


def measure_ablation(target: str, models: list[str] | None, without: list[str] | None) -> dict[str, Any]:
  """Compiles the gradient of every model under autocast without each mechanism; "nothing" stands for none."""
  device = target_device(target)
  report = origin(
    f"autocast ablation {target}", "flax", "optax", device=f"{device.device_kind}, described and not there"
  )
  chosen = None if without is None else [name for name in without if name != "nothing"]
  return report | {"models": _ablation.measure(device, models, chosen)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("measure", choices=("memory", "ablation"))
  parser.add_argument("target", choices=("cuda", "tpu"), help="what to compile for")
  parser.add_argument("--dtype", choices=POLICIES, default="bfloat16")
  parser.add_argument("--variant", choices=VARIANTS, action="append", help="leave the others out; may repeat")
  parser.add_argument(
    "--model", choices=EXAMPLES, action="append", help="of ablation; leave the others out; may repeat"
  )
  parser.add_argument(
    "--without", choices=(*_ablation.MECHANISMS, "nothing"), action="append", help="of ablation; may repeat"
  )


def run(options: argparse.Namespace) -> dict[str, Any]:
  if options.measure == "ablation":
    return measure_ablation(options.target, options.model, options.without)
  # The first is what the others are divided by.
  names = sorted(options.variant or VARIANTS, key=ORDER.index)
  return measure_memory(options.target, options.dtype, names)
