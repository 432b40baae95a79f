"""Published rates of training steps beside the time that a plan predicts for them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import time
from typing import Any

import yaml

import mpjax
from benchmarks._record import provenance
from benchmarks.step_time._decoder import Run, Sizes, training
from mpjax.planner import CompileError, Plan, Target, get_target

FILE = pathlib.Path(__file__).parent / "published.yaml"
_RUN = tuple(field.name for field in dataclasses.fields(Run))
_KINDS = {"tpu": "TPUs", "gpu": "GPUs"}


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of `published.yaml`.

  Attributes:
    name: of the row.
    target: the devices.
    sizes, run: what was trained, and how.
    mesh: number of devices along each axis.
    rows: sequences of a step.
    policy: as `mpjax.get_policy` takes it.
    seconds: of a step, as published or from the published rate.
    flags: of the compiler.
    source: where the rate is published.
    differs: what the planned step has otherwise than the run.
  """

  name: str
  target: Target
  sizes: Sizes
  run: Run
  mesh: dict[str, int]
  rows: int
  policy: Any
  seconds: float
  flags: str
  source: str
  differs: str


def rows() -> list[Row]:
  """Returns the rows of `published.yaml`.

  Raises:
    ValueError: for a rate or a key that is not known.
  """
  data = yaml.safe_load(FILE.read_text())
  return [_row(given, data) for given in data["rows"]]


def _row(given: dict[str, Any], data: dict[str, Any]) -> Row:
  target = get_target(given["target"])
  sizes = Sizes(**data["models"][given["model"]])
  options: dict[str, Any] = {"attention": "splash" if target.kind == "tpu" else "stated"}
  for key in _RUN & given.keys():
    options[key] = tuple(given[key]) if isinstance(given[key], list) else given[key]
  run = Run(**options)
  known = {
    "name",
    "model",
    "target",
    "policy",
    "mesh",
    "batch",
    "rate",
    "flags",
    "source",
    "where",
    "differs",
  }
  if extra := set(given) - known - set(_RUN):
    raise ValueError(f"{given['name']}: unknown keys {sorted(extra)}")
  tokens = given["batch"] * run.length  # of a device
  ((unit, rate),) = given["rate"].items()
  seconds = {
    "step": lambda: rate,
    "tokens": lambda: tokens / rate,
    "chip_tokens": lambda: 2 * tokens / rate,
    "full_tflops": lambda: tokens * sizes.token_flops(run.length) / (rate * 1e12),
  }
  if unit not in seconds:
    raise ValueError(f"{given['name']}: unknown rate {unit!r}: expected one of {', '.join(seconds)}")
  return Row(
    name=given["name"],
    target=target,
    sizes=sizes,
    run=run,
    mesh=given["mesh"],
    rows=given["batch"] * target.devices,
    policy=given["policy"],
    seconds=seconds[unit](),
    flags=" ".join(data["flags"][name] for name in given.get("flags", ())),
    source=f"{data['sources'][given['source']]}: {given['where']}",
    differs=given.get("differs", ""),
  )


def plan_of(row: Row) -> Plan:
  """Plans the step of a row with its target's compiler.

  Raises:
    mpjax.planner.CompileError: if the compiler fails.
  """
  step, state, batch = training(row.sizes, row.run, row.target, row.mesh, row.rows, row.policy)
  before = os.environ.get("LIBTPU_INIT_ARGS")
  if row.flags:
    os.environ["LIBTPU_INIT_ARGS"] = row.flags
  try:
    return mpjax.plan(step, state, batch, target=row.target, compile=True)
  finally:
    os.environ.pop("LIBTPU_INIT_ARGS", None)
    if before is not None:
      os.environ["LIBTPU_INIT_ARGS"] = before


def measure(row: Row) -> dict[str, Any]:
  """Returns the predicted and the published time of a row's step, and where the predicted time goes."""
  length = row.run.length
  tokens = row.rows * length / row.target.devices
  figures = {
    "row": row.name,
    "target": row.target.name,
    "kind": row.target.kind,
    "published_seconds": row.seconds,
    "published_tokens": tokens / row.seconds,
    "source": row.source,
    "differs": row.differs,
  }
  start = time.perf_counter()
  try:
    plan = plan_of(row)
  except CompileError as error:
    return figures | {"error": str(error)[:300]}
  time_of_step, floor, compiled = plan.time, plan.floor, plan.compiled
  if time_of_step is None or floor is None or compiled is None:
    return figures | {"error": "the plan has no time"}
  modules = sorted(time_of_step.modules.items(), key=lambda item: -item[1])[:8]
  return figures | {
    "policy": plan.label,
    "parameters": plan.parameters,
    "seconds": time_of_step.seconds,
    "ratio": time_of_step.seconds / row.seconds,
    "parts": time_of_step.parts,
    "hidden": time_of_step.hidden,
    "modules": dict(modules),
    "floor": floor.seconds,
    "peak": compiled.peak,
    "usable": plan.usable_memory,
    "plan_seconds": time.perf_counter() - start,
    "compile_seconds": compiled.seconds,
  }


def errors(report: dict[str, Any]) -> dict[str, list[float]]:
  """Returns |predicted / published - 1| of the rows of each kind of device."""
  found: dict[str, list[float]] = {}
  for row in report["rows"]:
    if "ratio" in row:
      found.setdefault(row["kind"], []).append(abs(row["ratio"] - 1))
  return found


def table(report: dict[str, Any]) -> str:
  """Returns the report as a table."""
  lines = [
    "| step | published s | predicted s | ratio | floor s | products | attention | other | collectives "
    "| hidden |",
    "|---|" + "---|" * 9,
  ]
  for row in report["rows"]:
    if "error" in row:
      lines.append(f"| {row['row']} | {row['published_seconds']:.2f} | does not compile |" + " |" * 7)
      continue
    parts = dict(row["parts"])
    named = [parts.pop(name, 0.0) for name in ("products", "attention kernels", "collectives")]
    cells = [row["published_seconds"], row["seconds"], row["ratio"], row["floor"], *named[:2]]
    cells += [sum(parts.values()), named[2], row["hidden"]]
    lines.append(f"| {row['row']} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
  lines.append("")
  for kind, found in errors(report).items():
    lines.append(f"Median error, {len(found)} steps on {_KINDS[kind]}: {statistics.median(found):.0%}.")
  return "\n".join([*lines, "", provenance(report)])
