"""Figures that pages say are those of the committed reports."""

import re
import statistics

import pytest

from benchmarks import quality, report
from benchmarks._runner import ROOT, one
from benchmarks.report import read


def test_a_table_is_what_its_report_says():
  assert report.written() == report.PAGE.read_text()


def test_every_report_is_shown_and_has_a_commit_and_a_date():
  text = report.PAGE.read_text()
  for file in report.RESULTS.glob("*.json"):
    assert re.search(rf"<!-- {file.stem} -->|`{file.stem}`|{file.name}", text), file
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


def losses(target):
  ways = ("linear_cross_entropy", "whole logits")
  return [of("large_vocabulary", "temporaries", 1e9, target=target, policy="bf16", loss=way) for way in ways]


def gathered(model):
  facts = {"target": "h200:8", "accumulate": 1, "model": model}
  return [of("gather", "peak", 1e9, gather=gather, **facts) for gather in ("step", "block")]


PEAKS = [of("memory", "peak", 1e9, model="gpt", rows=8, policy=policy) for policy in ("bf16", "fp32")]
FP8 = read("gpu_h200_1b")["targets"][2]["figure"]
LLAMA = gathered("llama")
INSPECTED = [max(row["passes"].values()) / row["step"] for row in read("numerics")["rows"][:2]]
LOOK = one(read("numerics"), what="look", where="gpt_stdlib")["again_s"]
LAYERWISE = [of("layerwise", "eval_loss", case=case) for case in ("layer-wise", "2^16")]
CHOSEN = [found["chosen"] for row in read("tune")["rows"] for found in row["targets"].values()]
STATE = [of("scaling", "arguments", 1e6, policy="bf16", data=1, fsdp=chips) for chips in (8, 256)]
KILLED = [row["outcome"] != "survived" for row in read("mutations")["after"]["faults"]]
README = "../benchmarks/README"
# A page, its words in one line, and the figures in them.
CLAIMS = [
  ("concepts/saved", "takes {:.2f} GB in place of {:.2f} GB", PEAKS),
  ("reference/kernels", "| H200 | {:.2f} GB | {:.2f} GB |", losses("h200")),
  ("reference/kernels", "| TPU v5e | {:.2f} GB | {:.2f} GB |", losses("v5e")),
  ("reference/gather", "a GPT of 0.9B {:.2f} and {:.2f} GB", gathered("gpt")),
  ("benchmarks", "takes {:.2f} times the memory |", [LLAMA[1] / LLAMA[0]]),
  ("numerics", "{:.2f} times the memory of the training step on an H200 and {:.2f} times", INSPECTED),
  (README, "{:.2f} times the memory of the training step on an H200, and {:.2f} times", INSPECTED),
  (README, "500 steps adds {:.1%} of the time", [LOOK["other"] / LOOK["step"] / 500]),
  (README, "holds {:.0f} MB a chip between steps, on 256 chips {:.0f} MB", STATE),
  (README, "of {} searches, for four configs on four devices, {}", [len(CHOSEN), CHOSEN.count("bf16")]),
  (
    README,
    "a loss of {:.4f} with layer-wise scales, as in float32; with the best single scale {:.4f}",
    LAYERWISE,
  ),
  ("loss_scaling", "loss of {:.4f}; the best single scale ends at {:.4f}", LAYERWISE),
  (README, "The tests find {} of {} small faults", [sum(KILLED), len(KILLED)]),
  ("fp8", "on an H200 FP8 gained {:.2f} (", [FP8]),
  ("benchmarks", "| {:.2f} of bfloat16's |", [FP8]),
  ("fp8", "`auto` takes {:.2f}, {:.2f} and {:.2f} of bfloat16's time", cycles("current")),
  ("fp8", "`delayed` {:.2f}, {:.2f} and {:.2f} (", cycles("delayed")),
  ("benchmarks", "optimiser-bound: time | {:.1f} (", [overhead("float32", "fp32, dynamic", "step_s")]),
  ("benchmarks", "| {:.1f} times the temporaries, ", [overhead("float16", "fp16", "temporaries")]),
  ("benchmarks", "| `bf16` | {:+.2%} | {:+.2%} |", differences("bf16")),
  ("benchmarks", "| `fp16` | {:+.2%} | {:+.2%} |", differences("fp16")),
  ("few_bytes", "| `optax.adamw` | {:.1f} |", [of("few_bytes", "held", target="h200", kept="optax.adamw")]),
]


@pytest.mark.parametrize(("page", "words", "figures"), CLAIMS)
def test_a_page_says_what_a_report_has(page, words, figures):
  text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
  assert words.format(*figures) in text
