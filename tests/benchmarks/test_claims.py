"""Figures that pages say are those of the committed reports."""

import re
import statistics

import pytest

from benchmarks import quality, report
from benchmarks._runner import ROOT, one
from benchmarks.report import read


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.parent.name)
def test_a_table_is_what_its_report_says(page):
  assert report.written(page) == page.read_text()


def test_every_report_is_shown_and_has_a_commit_and_a_date():
  text = report.PAGES[0].read_text()
  for file in report.RESULTS.glob("*.json"):
    assert f"<!-- {file.stem} -->" in text or file.name in text
    found = read(file.stem)
    assert re.fullmatch(r"[0-9a-f]{7,}", found["commit"]), file
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["date"]), file
    assert all("error" not in row for row in found.get("rows", ())), file


def of(name, key, scale=1.0, **facts):
  return one(read(name), **facts)[key] / scale


def cycles(policy):
  row = lambda target, policy: one(read("fp8_devices"), target=target, policy=policy)
  return [row(x, policy)["cycles"] / row(x, "bf16")["cycles"] for x in ("v5e", "v5p", "v6e")]


def overhead(dtype, policy, figure):
  found = one(read("overhead"), model="few tokens", dtype=dtype)["variants"]
  return found[f"mpjax.make_train_step {policy}"][figure] / found["hand-written"][figure]


def differences(policy):
  tasks = ("GPT, 2,048 bytes a batch", "GPT, 32,768 bytes a batch")
  return [statistics.fmean(quality.differences(read("quality"), task, policy)) for task in tasks]


GPT = {"target": "h200", "model": "gpt", "rows": 8}
LOSSES = [{"policy": "bf16", "loss": loss} for loss in ("linear_cross_entropy", "whole logits")]
GATHER = [{"target": "h200:8", "accumulate": 1, "gather": gather} for gather in ("step", "block")]
FP8 = read("gpu_h200_1b")["targets"][2]["figure"]
LLAMA = [of("gather", "peak", 1e9, model="llama", **facts) for facts in GATHER]
INSPECTED = [one(read("numerics"), what="memory", where=where) for where in ("h200", "v5e")]
# A page, its words, and the figures in them.
CLAIMS = [
  (
    "concepts/saved",
    "takes {:.2f} GB in place of {:.2f} GB",
    [of("memory", "peak", 1e9, policy=x, **GPT) for x in ("bf16", "fp32")],
  ),
  *(
    (
      "reference/kernels",
      f"| {name} | {{:.2f}} GB | {{:.2f}} GB |",
      [of("large_vocabulary", "temporaries", 1e9, target=target, **x) for x in LOSSES],
    )
    for name, target in (("H200", "h200"), ("TPU v5e", "v5e"))
  ),
  (
    "reference/gather",
    "a GPT of 0.9B {:.2f} and {:.2f} GB",
    [of("gather", "peak", 1e9, model="gpt", **x) for x in GATHER],
  ),
  ("benchmarks", "takes {:.2f} times the memory |", [LLAMA[1] / LLAMA[0]]),
  (
    "numerics",
    "takes {:.2f} times the memory of\nthe training step on an H200 and {:.2f} times",
    [max(row["passes"].values()) / row["step"] for row in INSPECTED],
  ),
  ("fp8", "on an H200 FP8 gained {:.2f} (", [FP8]),
  ("benchmarks", "| {:.2f} of bfloat16's |", [FP8]),
  ("fp8", "`auto` takes {:.2f}, {:.2f} and {:.2f} of bfloat16's time", cycles("current")),
  ("fp8", "`delayed` {:.2f}, {:.2f} and\n  {:.2f} (", cycles("delayed")),
  ("benchmarks", "optimiser-bound: time | {:.1f} (", [overhead("float32", "fp32, dynamic", "step_s")]),
  ("benchmarks", "| {:.1f} times the temporaries, ", [overhead("float16", "fp16", "temporaries")]),
  ("benchmarks", "| `bf16` | {:+.2%} | {:+.2%} |", differences("bf16")),
  ("benchmarks", "| `fp16` | {:+.2%} | {:+.2%} |", differences("fp16")),
  ("few_bytes", "| `optax.adamw` | {:.1f} |", [of("few_bytes", "held", target="h200", kept="optax.adamw")]),
]


@pytest.mark.parametrize(("page", "words", "figures"), CLAIMS)
def test_a_page_says_what_a_report_has(page, words, figures):
  assert words.format(*figures) in (ROOT / "docs" / f"{page}.md").read_text()
