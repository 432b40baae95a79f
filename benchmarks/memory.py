"""Peak memory of a training step by policy, and what a row of the batch adds to it, compiled.

GPT, ViT and ResNet of `mpjax.zoo.models` with the optimisers of configs/, at a small and a large batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._runner import ROOT, Row, markdown, one, plan_figures
from mpjax.planner import get_target
from mpjax.train import Planner, load_config, load_plugins, register_data

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
POLICIES = {"h200": ("fp32", "bf16", "fp16")}


@dataclasses.dataclass(frozen=True)
class Model:
  """A model and its data.

  Attributes:
    config: a file in configs/.
    sizes: overrides of its model.
    data: what a row is.
    rows: of a small and of a large batch.
  """

  config: str
  sizes: tuple[str, ...]
  data: tuple[str, ...]
  rows: tuple[int, int]


MODELS = {
  "gpt": Model(
    "gpt_stdlib",
    ("dim=768", "layers=12", "heads=12"),
    ("kind=random_tokens", "vocab_size=50304", "seq_len=1024"),
    (2, 8),
  ),
  "vit": Model(
    "vit_digits",
    ("dim=384", "layers=12", "heads=6", "patch=16"),
    ("kind=blank_images", "side=224", "classes=1000"),
    (16, 64),
  ),
  "resnet": Model(
    "resnet_digits",
    ("width=64", "stages=[3,4,6]"),
    ("kind=blank_images", "side=32", "classes=100"),
    (64, 256),
  ),
}


@register_data("blank_images")
def blank_images(*, side: int, classes: int) -> Any:
  """Images of a size that no data here has."""
  rows = [{"images": np.zeros((side, side, 3), np.float32), "labels": np.int32(0)}]
  return rows, rows, {"image_shape": (side, side, 3), "num_classes": classes}


def rows() -> Iterator[Row]:
  """Both batches by device, model and policy."""
  for target, model in itertools.product(POLICIES, MODELS):
    for policy, count in itertools.product(POLICIES[target], MODELS[model].rows):
      facts = {"target": target, "model": model, "policy": policy, "rows": count}
      yield Row(facts, functools.partial(figures, target, model, policy, count))


def figures(target: str, model: str, policy: str, rows: int) -> dict[str, Any]:
  """What the step takes, by the compiler."""
  load_plugins([str(ROOT / "examples" / "llama" / "llama.py")])  # random tokens
  chosen = MODELS[model]
  overrides = [f"model.{size}" for size in chosen.sizes] + [f"data.{fact}" for fact in chosen.data]
  config = load_config(str(ROOT / "configs" / f"{chosen.config}.yaml"), [*overrides, "mesh.data=1"])
  return plan_figures(Planner(config, get_target(target)).plan(policy, batch=rows, compile=True))


def bytes_a_row(report: dict[str, Any], target: str, model: str, policy: str) -> float:
  """How much a row adds to the peak."""
  few, many = MODELS[model].rows
  less, more = (
    one(report, target=target, model=model, policy=policy, rows=count)["peak"] for count in (few, many)
  )
  return float(more - less) / (many - few)


def table(report: dict[str, Any]) -> str:
  """Peaks of the large batch, what a row adds, and that by float32's."""
  lines = []
  for target, policies in POLICIES.items():
    for policy in policies:
      cells = [target, policy]
      for model, chosen in MODELS.items():
        row = one(report, target=target, model=model, policy=policy, rows=chosen.rows[1])
        more, base = (bytes_a_row(report, target, model, name) for name in (policy, "fp32"))
        cells += [f"{row['peak'] / 1e9:.2f}", f"{more / 1e6:.1f} ({more / base:.2f})"]
      lines.append(cells)
  heads = [
    text
    for model, chosen in MODELS.items()
    for text in (f"{model}, {chosen.rows[1]} rows: GB", "MB a row (by fp32's)")
  ]
  return markdown(["compiled for", "policy", *heads], lines)
