"""Peak memory of a training step by policy, and what a row of the batch adds to it, compiled.

GPT, ViT and ResNet of `mpjax.zoo.models` with the optimisers of configs/, at a small and a large batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._runner import ROOT, Row, markdown, one, plan_figures
from mpjax.planner import get_target
from mpjax.train import Planner, load_config, load_plugins, register_data

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
TARGET = "h200"
POLICIES = ("fp32", "bf16", "fp16")
# Config, overrides of its model and data, and rows of a small and of a large batch.
MODELS = {
  "gpt": (
    "gpt_stdlib",
    ("model.dim=768", "model.layers=12", "model.heads=12"),
    ("data.kind=random_tokens", "data.vocab_size=50304", "data.seq_len=1024"),
    (2, 8),
  ),
  "vit": (
    "vit_digits",
    ("model.dim=384", "model.layers=12", "model.heads=6", "model.patch=16"),
    ("data.kind=blank_images", "data.side=224", "data.classes=1000"),
    (16, 64),
  ),
  "resnet": (
    "resnet_digits",
    ("model.width=64", "model.stages=[3,4,6]"),
    ("data.kind=blank_images", "data.side=32", "data.classes=100"),
    (64, 256),
  ),
}


@register_data("blank_images")
def blank_images(*, side: int, classes: int) -> Any:
  """Images of a size that no data here has."""
  rows = [{"images": np.zeros((side, side, 3), np.float32), "labels": np.int32(0)}]
  return rows, rows, {"image_shape": (side, side, 3), "num_classes": classes}


def rows() -> Iterator[Row]:
  """Both batches by model and policy."""
  for model, policy in itertools.product(MODELS, POLICIES):
    for count in MODELS[model][-1]:
      facts = {"target": TARGET, "model": model, "policy": policy, "rows": count}
      yield Row(facts, functools.partial(figures, model, policy, count))


def figures(model: str, policy: str, rows: int) -> dict[str, Any]:
  """What the step takes, by the compiler."""
  load_plugins([str(ROOT / "examples" / "llama" / "llama.py")])  # random tokens
  name, sizes, data, _ = MODELS[model]
  config = load_config(str(ROOT / "configs" / f"{name}.yaml"), [*sizes, *data, "mesh.data=1"])
  return plan_figures(Planner(config, get_target(TARGET)).plan(policy, batch=rows, compile=True))


def table(report: dict[str, Any]) -> str:
  """Peaks of the large batch, what a row adds, and that by float32's."""
  lines = []
  for policy in POLICIES:
    cells = [TARGET, policy]
    for model, (*_, (few, many)) in MODELS.items():
      peak = lambda policy, rows, model=model: one(report, model=model, policy=policy, rows=rows)["peak"]
      more, base = ((peak(name, many) - peak(name, few)) / (many - few) for name in (policy, "fp32"))
      cells += [f"{peak(policy, many) / 1e9:.2f}", f"{more / 1e6:.1f} ({more / base:.2f})"]
    lines.append(cells)
  heads = [
    text
    for model, (*_, (_, many)) in MODELS.items()
    for text in (f"{model}, {many} rows: GB", "MB a row (by fp32's)")
  ]
  return markdown(["compiled for", "policy", *heads], lines)
