"""The planned time of training steps beside published rates.

`published_steps.yaml` has the rates and their sources. A decoder in plain JAX stands for each model, with the
mesh, recomputation and compiler flags of the run.
"""

from __future__ import annotations

import functools
import os
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import yaml

import mpjax
from benchmarks._decoder import Decoder
from benchmarks._runner import Row, markdown
from mpjax.planner import CompileError, get_target

PACKAGES = ("optax", "libtpu", "jax-cuda13-plugin")
PUBLISHED: dict[str, Any] = yaml.safe_load(
  (pathlib.Path(__file__).parent / "published_steps.yaml").read_text()
)
_ABOUT = ("name", "model", "policy", "rate", "flags", "source", "where", "differs")  # what no decoder takes


def rows() -> Iterator[Row]:
  """The published steps."""
  for given in PUBLISHED["rows"]:
    yield Row({"step": given["name"], "target": given["target"]}, functools.partial(figures, given))


def decoder_of(given: dict[str, Any]) -> Decoder:
  """The decoder of a published step."""
  how: dict[str, Any] = {key: given[key] for key in given if key not in _ABOUT}
  return Decoder(**PUBLISHED["models"][given["model"]], **how | {"target": get_target(given["target"])})


def seconds_of(given: dict[str, Any], decoder: Decoder) -> float:
  """The seconds of a step by the rate that is published of it."""
  tokens = decoder.batch * decoder.length  # of a device
  ((unit, rate),) = given["rate"].items()
  flops = tokens * decoder.token_flops() / 1e12
  return {"step": rate, "tokens": tokens / rate, "full_tflops": flops / rate}[unit]


def figures(given: dict[str, Any]) -> dict[str, Any]:
  """The planned time of a step and its parts; a `problem` where the compiler finds one."""
  decoder = decoder_of(given)
  known: dict[str, Any] = {"kind": decoder.target.kind, "published": seconds_of(given, decoder)}
  flags = " ".join(PUBLISHED["flags"][flag] for flag in given.get("flags", ()))
  os.environ |= {"LIBTPU_INIT_ARGS": flags} if flags else {}
  try:
    plan = mpjax.plan(*decoder.training(given["policy"]), target=decoder.target, compile=True)
  except CompileError as error:
    return known | {"problem": str(error)[:300]}
  assert plan.time is not None
  assert plan.floor is not None
  return known | {
    "seconds": plan.time.seconds,
    "parts": plan.time.parts,
    "floor": plan.floor.seconds,
    "peak": plan.peak,
  }


def errors(report: dict[str, Any], kind: str) -> list[float]:
  """How far from the published time, as a share of it, each time of a kind of device is planned."""
  found = (row for row in report["rows"] if row["kind"] == kind and "seconds" in row)
  return [abs(row["seconds"] / row["published"] - 1) for row in found]


def table(report: dict[str, Any]) -> str:
  """Published, planned and least seconds."""
  lines = []
  for row in report["rows"]:
    cells = [row["step"], f"{row['published']:.2f}"]
    if "problem" in row:
      lines.append([*cells, "does not compile", "", "", ""])
      continue
    planned = [row["seconds"], row["seconds"] / row["published"], row["floor"]]
    largest = max(row["parts"], key=row["parts"].__getitem__)
    lines.append([*cells, *(f"{x:.2f}" for x in planned), f"{largest} {row['parts'][largest]:.2f}"])
  medians = [
    f"Median error, {len(found)} steps on {kind.upper()}s: {statistics.median(found):.0%}."
    for kind in ("tpu", "gpu")
    if (found := errors(report, kind))
  ]
  heads = ["step", "published s", "planned s", "ratio", "at least s", "largest part s"]
  return "\n".join([markdown(heads, lines), "", *medians])
