"""What the gpu suite measures: models and their sizes, and the rows of each in order of importance."""

from __future__ import annotations

import argparse
from typing import Any

import yaml

ADAMW = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
REFERENCE = "hand-written JAX, bf16"
FUSED = {"base": "bf16", "autocast": False}
# Name to by what it trains, the policy, and the peak that its products could reach.
ROWS: dict[str, dict[str, Any]] = {
  "fp32": {"policy": {"base": "fp32", "matmul_precision": "float32"}, "peak": "float32"},
  "tf32": {"policy": {"base": "tf32"}, "peak": "tensorfloat32"},
  "bf16": {"policy": {"base": "bf16"}, "peak": "bfloat16"},
  "bf16, fused attention": {"policy": FUSED, "peak": "bfloat16", "attention": "cudnn"},
  "fp16": {"policy": {"base": "fp16"}, "peak": "float16"},
  "fp8, current": {"policy": {"base": "fp8", "fp8": {"recipe": "current"}}, "peak": "float8"},
  "fp8, per channel": {"policy": {"base": "fp8", "fp8": {"recipe": "per_channel"}}, "peak": "float8"},
  "fp8, fused attention": {
    "policy": {"base": "fp8", "fp8": {"recipe": "current"}},
    "peak": "float8",
    "attention": "cudnn",
  },
  "fp8, delayed": {"policy": {"base": "fp8", "fp8": {"recipe": "delayed"}}, "peak": "float8"},
  REFERENCE: {"by": "hand", "policy": "bfloat16", "peak": "bfloat16"},
  "mpx, bf16": {"by": "mpx", "policy": "bfloat16", "peak": "bfloat16"},
  "mpx, fp16": {"by": "mpx", "policy": "float16", "peak": "float16"},
  "torch, bf16": {"by": "torch", "policy": "bf16", "peak": "bfloat16"},
  "torch, fp16": {"by": "torch", "policy": "fp16", "peak": "float16"},
}
BASES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_HALF = ("bf16", REFERENCE, "torch, bf16")
_GPT = (
  *_HALF,
  "fp32",
  "bf16, fused attention",
  "fp16",
  "fp8, current",
  "torch, fp16",
  "tf32",
  "fp8, delayed",
)
_LARGE = (
  "bf16, fused attention",
  "fp8, fused attention",
  "bf16",
  "fp8, current",
  "torch, bf16",
  REFERENCE,
  "fp8, delayed",
  "fp8, per channel",
)
_VIT = (
  *_HALF,
  "fp32",
  "mpx, bf16",
  "fp16",
  "mpx, fp16",
  "fp8, current",
  "bf16, fused attention",
  "torch, fp16",
  "tf32",
  "fp8, delayed",
)
# FP8 is for products, and a ResNet has convolutions.
_RESNET = (*_HALF, "fp32", "fp16", "torch, fp16", "tf32")

# `weight`: what part of the time that is left is a model's, beside the weights of those after it.
MODELS: dict[str, dict[str, Any]] = {
  "gpt-124m": {
    "title": "GPT, 124M parameters",
    "kind": "gpt",
    "sizes": {"layers": 12, "dim": 768, "heads": 12, "vocab": 50304},
    "seq": 1024,
    "batch": 8,
    "steps": 5,
    "rounds": 6,
    "weight": 0.34,
    "rows": _GPT,
  },
  "gpt-1b": {
    "title": "GPT, 1.0B parameters",
    "kind": "gpt",
    "sizes": {"layers": 24, "dim": 1792, "heads": 14, "vocab": 50304},
    "seq": 1024,
    "batch": 8,
    "steps": 3,
    "rounds": 5,
    "weight": 0.26,
    "rows": _LARGE,
  },
  "vit-b": {
    "title": "ViT-B/16 at 224",
    "kind": "vit",
    "sizes": {"layers": 12, "dim": 768, "heads": 12, "patch": 16, "classes": 1000},
    "image": 224,
    "batch": 64,
    "steps": 5,
    "rounds": 6,
    "weight": 0.22,
    "rows": _VIT,
  },
  "resnet-50": {
    "title": "ResNet-50 at 224",
    "kind": "resnet",
    "sizes": {"stages": [3, 4, 6, 3], "width": 64, "classes": 1000},
    "image": 224,
    "batch": 128,
    "steps": 5,
    "rounds": 6,
    "weight": 0.18,
    "rows": _RESNET,
  },
}
_TINY_GPT = {"sizes": {"layers": 2, "dim": 64, "heads": 4, "vocab": 256}, "seq": 64, "batch": 2}
_TINY: dict[str, dict[str, Any]] = {
  "gpt-124m": _TINY_GPT,
  "gpt-1b": _TINY_GPT | {"sizes": {"layers": 3, "dim": 128, "heads": 2, "vocab": 256}},
  "vit-b": {
    "sizes": {"layers": 2, "dim": 64, "heads": 4, "patch": 8, "classes": 10},
    "image": 32,
    "batch": 4,
  },
  "resnet-50": {"sizes": {"stages": [1, 1, 1, 1], "width": 8, "classes": 10}, "image": 32, "batch": 4},
}
# Side of the squares that peaks are taken from, and how many are on their way at once.
PEAKS = {"full": {"size": 8192, "calls": 20}, "tiny": {"size": 256, "calls": 2}}


def model(name: str, size: str) -> dict[str, Any]:
  """A model's entry at size `full` or `tiny`."""
  if size == "full":
    return dict(MODELS[name])
  return MODELS[name] | _TINY[name] | {"title": f"tiny {name}", "steps": 2, "rounds": 2}


def task(model: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
  """What the process of a row is given."""
  keys = ("kind", "sizes", "seq", "image", "batch", "steps")
  return {key: model[key] for key in keys if key in model} | {
    "measure": "step",
    "by": row.get("by", "mpjax"),
    "policy": row["policy"],
    "attention": row.get("attention", "xla"),
    "adamw": ADAMW,
    "warm_up": 2,
  }


def units(model: dict[str, Any]) -> tuple[str, int]:
  """What a step goes through, and how many of them."""
  return ("tokens", model["batch"] * model["seq"]) if model["kind"] == "gpt" else ("images", model["batch"])


def parse(text: str) -> tuple[str, dict[str, Any]]:
  """A row by name, or a new one: `fp8 saved={base: fp8, fp8: {saved_activations: fp8}}`."""
  name, equals, spec = text.partition("=")
  if not equals and name in ROWS:
    return name, ROWS[name]
  given = yaml.safe_load(spec) if equals else None
  if not isinstance(given, dict) or given.get("base") not in BASES:
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected one of {'; '.join(ROWS)}; or NAME=YAML with a base ({', '.join(BASES)})"
    )
  peaks = {"fp8": "fp8, current"}
  base = str(given["base"])
  return name, {"policy": given, "peak": ROWS[peaks.get(base, base)]["peak"]}
