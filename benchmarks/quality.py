"""Evaluation loss by policy over several seeds, beside float32 with the same seed.

A row is a run of `mpjax train`. The same seed has the same data and the same first weights. FP8 is emulated
where the machine has no units for it.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks._runner import ROOT, Row, chosen, markdown
from mpjax.train import run as train

PACKAGES = ("flax", "optax")
BASE, INT8 = "fp32", "bf16, int8 state"
FP8 = "base: fp8, fp8: {emulate: true"
# By the name in the table; the first is what the others are compared with.
POLICIES = {
  BASE: "fp32",
  "bf16": "bf16",
  "fp16": "fp16",
  "fp16, no loss scale": "{base: fp16, loss_scaling: null}",
  "fp8": f"{{{FP8}}}}}",
  # Of products that are too small to gain from it, too, which the preset leaves in bfloat16.
  "fp8, min_dim 16": f"{{{FP8}, min_dim: 16}}}}",
  INT8: "{base: bf16, optimizer_dtype: int8}",
  "bf16, bfloat16 state": "{base: bf16, optimizer_dtype: bfloat16}",
  "bf16_lean": "bf16_lean",
}


class Task(NamedTuple):
  """What is trained: a config with what is set otherwise, beside float32 the policies, and a plug-in."""

  config: tuple[str, ...]
  policies: tuple[str, ...]
  plugin: str | None = None


SEEDS = 2
GPT = "configs/gpt_stdlib.yaml"
_SMALL = ("model.layers=2", "data.batch_size=8", "data.eval_batches=100", "train.steps=300")
_SMALL_GPT = (GPT, *_SMALL, "model.dim=128", "model.heads=2")
# A batch of a size that one takes on an accelerator: each byte's share of the gradient is small.
_LARGE_BATCH = (
  *(GPT, "model.dim=32", "model.layers=4", "model.heads=2", "data.seq_len=256", "data.batch_size=128"),
  *("optimizer.warmup_steps=20", "optimizer.learning_rate=5e-3", "train.steps=100", "data.eval_batches=6"),
)
_ADAMW = ("optimizer.name=adamw", "optimizer.learning_rate=2e-3")
_MUON = ("optimizer.name=muon", "optimizer.learning_rate=5e-3", "optimizer.options={}")
TASKS = {
  "GPT, 2,048 bytes a batch": Task(
    (GPT, "train.steps=400", "data.eval_batches=100"), ("bf16", "fp16", "fp16, no loss scale", "fp8")
  ),
  "GPT, 32,768 bytes a batch": Task(_LARGE_BATCH, ("bf16", "fp16", "fp16, no loss scale")),
  "Llama": Task(
    ("examples/llama/stdlib.yaml", *_SMALL), ("fp8, min_dim 16", INT8), "examples/llama/llama.py"
  ),
  "ViT on digits": Task(("configs/vit_digits.yaml",), ("bf16", "bf16_lean")),
  "ResNet on digits": Task(("configs/resnet_digits.yaml", *_ADAMW, "optimizer.options={}"), (INT8,)),
  "small GPT, AdamW": Task((*_SMALL_GPT, *_ADAMW), (INT8, "bf16_lean")),
  "Muon": Task((*_SMALL_GPT, *_MUON), ("bf16, bfloat16 state", INT8)),
}


def rows() -> Iterator[Row]:
  """A run for each task, policy and seed; each seed of all before the next."""
  for seed, (name, task) in itertools.product(range(SEEDS), TASKS.items()):
    for policy in (BASE, *task.policies):
      facts = {"task": name, "policy": policy, "seed": seed}
      yield Row(facts, functools.partial(measure, task, policy, seed))


def measure(task: Task, policy: str, seed: int) -> dict[str, Any]:
  """Trains, and returns the evaluation at the end."""
  file, *changes = task.config
  with tempfile.TemporaryDirectory() as folder:
    end = ("train.eval_every=1000000", "train.checkpoint_every=1000000")
    own = [f"policy={POLICIES[policy]}", f"seed={seed}", f"out={pathlib.Path(folder, 'run')}"]
    result = train(
      str(ROOT / file), [*changes, *end, *own], plugins=[str(ROOT / task.plugin)] if task.plugin else []
    )
  return {"eval_loss": result.eval_loss, "steps": result.steps, "skipped_steps": result["skipped_steps"]}


def differences(report: dict[str, Any], task: str, policy: str) -> list[float]:
  """By seed: how far the loss is from float32's, as a share of the mean of that."""
  base = {row["seed"]: row["eval_loss"] for row in chosen(report, task=task, policy=BASE)}
  mean = statistics.fmean(base.values())
  rows = chosen(report, task=task, policy=policy)
  return [(row["eval_loss"] - base[row["seed"]]) / mean for row in rows]


def table(report: dict[str, Any]) -> str:
  """Mean difference from float32 and its standard error over the seeds, policies down and tasks across."""
  lines = [["float32's loss", *(f"{_loss(report, task):.4f}" for task in TASKS)]]
  for policy in list(POLICIES)[1:]:
    lines.append([policy, *(_cell(report, task, policy) for task in TASKS)])
  return markdown(["policy", *TASKS], lines)


def _loss(report: dict[str, Any], task: str) -> float:
  return statistics.fmean(row["eval_loss"] for row in chosen(report, task=task, policy=BASE))


def _cell(report: dict[str, Any], task: str, policy: str) -> str:
  found = differences(report, task, policy)
  if len(found) < 2:
    return f"{found[0]:+.2%}" if found else ""
  return f"{statistics.fmean(found):+.2%} ± {statistics.stdev(found) / len(found) ** 0.5:.2%}"
