"""Compiled memory of a gradient under `mpjax.autocast` beside the same model cast by hand.

A GPT (768 wide, 4 layers, 512 tokens, batch 16) and a ViT (384 wide, 6 layers, 224 x 224, batch 32) in
bfloat16. By hand, layers have linen's `dtype`; softmax, statistics of norms and loss stay in float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

import mpjax
from benchmarks._runner import Row, compile_for, markdown, memory, one
from benchmarks._transformers import Task, gpt, vit

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
MODELS = {"GPT": gpt(768, 12, 4, seq=512, batch=16), "ViT": vit(384, 6, 6, side=224, batch=32)}
SAVE_DOTS = jax.checkpoint_policies.dots_saveable
HAND = "by hand"
COLUMNS = (("h200", "GPT"), ("h200", "ViT"), ("v5e", "GPT"))

# Name to task -> loss.
CASTS: dict[str, Callable[[Task], Callable[[Any, Any], jax.Array]]] = {
  HAND: lambda task: task.loss("bfloat16"),
  "by hand, dots_saveable": lambda task: jax.checkpoint(task.loss("bfloat16"), policy=SAVE_DOTS),
  "autocast": lambda task: mpjax.autocast(task.loss(), "bf16"),
  "autocast, dots_saveable": lambda task: mpjax.autocast(
    jax.checkpoint(task.loss(), policy=SAVE_DOTS), "bf16"
  ),
  "float32": lambda task: task.loss(),
}


def rows() -> Iterator[Row]:
  """Each way to cast by device and model."""
  for (target, model), casts in itertools.product(COLUMNS, CASTS):
    facts = {"target": target, "model": model, "casts": casts}
    yield Row(facts, functools.partial(figures, **facts))


def figures(target: str, model: str, casts: str) -> dict[str, Any]:
  """Memory of the loss and its gradient."""
  task = MODELS[model]
  gradient = jax.value_and_grad(CASTS[casts](task))
  return memory(compile_for(target, gradient, jax.eval_shape(task.init), {"x": task.x, "y": task.y}))


def table(report: dict[str, Any]) -> str:
  """Temporaries, and their ratio to those by hand."""
  lines = []
  for casts in CASTS:
    cells = [casts]
    for target, model in COLUMNS:
      size, by_hand = (
        one(report, target=target, model=model, casts=name)["temporaries"] for name in (casts, HAND)
      )
      cells.append(f"{size / 1e6:.0f} MB ({size / by_hand:.2f})")
    lines.append(cells)
  return markdown(["temporaries", *(f"{model}, {target}" for target, model in COLUMNS)], lines)
