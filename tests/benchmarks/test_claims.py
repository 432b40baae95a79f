"""Figures that pages say are those of the committed reports."""

import functools
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


def memory_of(policy):
  return one(read("memory"), target="h200", model="gpt", policy=policy, rows=8)["peak"] / 1e9


def vocabulary(target, loss):
  return one(read("large_vocabulary"), target=target, policy="bf16", loss=loss)["temporaries"] / 1e9


def gathered(gather, model="llama"):
  row = one(read("gather"), target="h200:8", model=model, accumulate=1, gather=gather)
  return row["peak"] / 1e9


def inspected(where):
  row = one(read("numerics"), what="memory", where=where)
  return max(row["passes"].values()) / row["step"]


def cycles(target, policy):
  of = functools.partial(one, read("fp8_devices"), target=target)
  return of(policy=policy)["cycles"] / of(policy="bf16")["cycles"]


def overhead(model, dtype, policy, figure):
  found = one(read("overhead"), model=model, dtype=dtype)["variants"]
  return found[f"mpjax.make_train_step {policy}"][figure] / found["hand-written"][figure]


def difference(task, policy):
  return statistics.fmean(quality.differences(read("quality"), task, policy))


def gpt_1b(name):
  (model,) = read("gpu_h200_1b")["models"].values()
  return model["rows"][name]["seconds"]


def update(kept):
  h200, v5e = (one(read("few_bytes"), target=target, kept=kept) for target in ("h200", "v5e"))
  return h200["held"], h200["accessed"], v5e["accessed"]


SMALL, LARGE = "GPT, 2,048 bytes a batch", "GPT, 32,768 bytes a batch"
CHUNKS, WHOLE = "linear_cross_entropy", "whole logits"
# A page, its words, and the figures in them.
CLAIMS = [
  ("concepts/saved", "takes {:.2f} GB in place of {:.2f} GB", lambda: map(memory_of, ("bf16", "fp32"))),
  (
    "reference/kernels",
    "| H200 | {:.2f} GB | {:.2f} GB |",
    lambda: (vocabulary("h200", x) for x in (CHUNKS, WHOLE)),
  ),
  (
    "reference/kernels",
    "| TPU v5e | {:.2f} GB | {:.2f} GB |",
    lambda: (vocabulary("v5e", x) for x in (CHUNKS, WHOLE)),
  ),
  (
    "reference/gather",
    "a GPT of 0.9B {:.2f} and {:.2f} GB",
    lambda: (gathered(x, model="gpt") for x in ("step", "block")),
  ),
  ("benchmarks", "takes {:.2f} times the memory |", lambda: [gathered("block") / gathered("step")]),
  (
    "numerics",
    "takes {:.2f} times the memory of\nthe training step on an H200 and {:.2f} times on a TPU v5e",
    lambda: map(inspected, ("h200", "v5e")),
  ),
  ("fp8", "on an H200 FP8 gained {:.2f} (", lambda: [gpt_1b("bf16") / gpt_1b("fp8, current")]),
  ("benchmarks", "| {:.2f} of bfloat16's |", lambda: [gpt_1b("bf16") / gpt_1b("fp8, current")]),
  (
    "fp8",
    "`auto` takes {:.2f}, {:.2f} and {:.2f} of bfloat16's time",
    lambda: (cycles(x, "current") for x in TPUS),
  ),
  ("fp8", "`delayed` {:.2f}, {:.2f} and\n  {:.2f} (", lambda: (cycles(x, "delayed") for x in TPUS)),
  (
    "benchmarks",
    "optimiser-bound: time | {:.1f} (",
    lambda: [overhead("few tokens", "float32", "fp32, dynamic", "step_s")],
  ),
  (
    "benchmarks",
    "| {:.1f} times the temporaries, ",
    lambda: [overhead("few tokens", "float16", "fp16", "temporaries")],
  ),
  ("benchmarks", "| `bf16` | {:+.2%} | {:+.2%} |", lambda: (difference(x, "bf16") for x in (SMALL, LARGE))),
  ("benchmarks", "| `fp16` | {:+.2%} | {:+.2%} |", lambda: (difference(x, "fp16") for x in (SMALL, LARGE))),
  ("few_bytes", "| `optax.adamw` | {:.1f} | {:.0f} | {:.0f} |", lambda: update("optax.adamw")),
  (
    "few_bytes",
    "| state `int8`, weights `int8` | {:.1f} | {:.0f} | {:.0f} |",
    lambda: update("state int8, weights int8"),
  ),
]
TPUS = ("v5e", "v5p", "v6e")


@pytest.mark.parametrize(("page", "words", "figures"), CLAIMS)
def test_a_page_says_what_a_report_has(page, words, figures):
  assert words.format(*figures()) in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_errors_of_planned_times_are_as_the_page_says():
  found = [
    abs(row["seconds"] / row["published"] - 1) for row in read("step_time")["rows"] if "seconds" in row
  ]
  assert len(found) == 24
  assert statistics.median(found) < 0.2
  assert 0.5 < max(found) < 0.55
