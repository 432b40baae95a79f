"""Training on a GPU under every policy, beside hand-written JAX, mpx and PyTorch, in one run of some minutes.

    python scripts/bench.py gpu [--model NAME] [--policy NAME] [--measure steps|products|largest-batch]
      [--torch-python PATH] [--minutes M] [--cache DIR] [--size tiny] [--json FILE]

Models: GPT of 124M and of 1.0B parameters on 1024 tokens, ViT-B/16 and ResNet-50 on 224 x 224, with AdamW on
random data. Rows of each: mpjax under its policies (`fp32` is float32 throughout, not JAX's default, which on
a GPU is TensorFloat-32); the same model cast by hand to bfloat16; the ViT by the package mpx; and an equal
PyTorch model under autocast, compiled, with the fused AdamW and, in float16, its GradScaler. A row whose
number of parameters or first loss is not its model's is an error.

A row is a process of its own, so that its peak of memory is its own, and one that ends leaves the others.
Those of a model compile several at once, then live side by side as far as they fit the device, and take turns
in every round, in shuffled order: a step that is not timed, `--steps` that are, one wait. Ratios are taken
within a round.

Peaks are those of large square products that the device really reaches, measured in the same rounds. FLOPs of
a step are those of the products and convolutions of the traced forward pass, times three (see
`gpu_models.figures`). For FP8 the peak is that of a mixture: of float8 for the share of FLOPs that is FP8, of
bfloat16 for the rest. Activation memory is the peak less what lives all the time (parameters, moments, loss
scale, statistics, FP8 histories, the batch): gradients and half-precision copies of parameters are in it.

The most important rows come first. What there was no time for in `--minutes` is named in the report; a second
call with the same `--cache` compiles nothing that the first has compiled (and says nothing of compile times).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import platform
import shlex
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks._record import origin, write
from benchmarks._worker import Worker
from benchmarks.gpu import _extra, _rows, _summary
from benchmarks.gpu._stage import OUT_OF_TIME, Stage
from benchmarks.gpu._summary import pictures, tables

__all__ = ["add_arguments", "pictures", "run", "tables"]

PEAKS = "matrix peaks"
MEMORY_SHARE = 0.95
FOR_COMPILING = 0.72  # of a model's time
AT_THE_END = 12.0  # seconds in which the last round and the report end
MEASURES = ("steps", "products", "largest-batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The suite's own options."""
  parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: also runs on a CPU")
  parser.add_argument("--measure", choices=MEASURES, action="append", help="default: steps")
  parser.add_argument("--model", choices=_rows.MODELS, action="append", help="default: all")
  parser.add_argument(
    "--policy",
    action="append",
    type=_rows.parse,
    metavar="NAME",
    help="a row, or NAME=YAML of a policy",
  )
  for name in ("batch", "rounds", "steps"):
    parser.add_argument(f"--{name}", type=int)
  parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch")
  parser.add_argument("--minutes", type=float, default=8.0)
  parser.add_argument("--cache", type=pathlib.Path, metavar="DIR", help="keeps compiled programs")
  cores = os.cpu_count() or 1
  parser.add_argument(
    "--compiling",
    type=int,
    default=max(1, min(5, cores // 3)),
    help="programs of JAX compiled at once; 1: nothing disturbs XLA's choice of kernels",
  )


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Measures, prints and returns the report."""
  import jax

  # This process measures nothing, and leaves the accelerator to those that it starts.
  jax.config.update("jax_platforms", "cpu")
  with tempfile.TemporaryDirectory(prefix="mpjax-gpu-") as folder:
    return Suite(options, str(options.cache or folder)).run()


class Suite:
  """One call: its options, when it has to end, and the report so far."""

  def __init__(self, options: argparse.Namespace, cache: str):
    self.options = options
    self.begun = time.monotonic()
    self.until = self.begun + 60 * options.minutes - AT_THE_END
    self.environment = {
      "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
      "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_SHARE),
      # Programs that are started again are there, and kernels are chosen once for all rows.
      "JAX_COMPILATION_CACHE_DIR": cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    self.models = {name: _rows.model(name, options.size) for name in options.model or _rows.MODELS}
    for model in self.models.values():
      model |= {key: getattr(options, key) for key in ("batch", "rounds", "steps") if getattr(options, key)}
      model["rows"] = self._rows(model)
    self.memory: int | None = None
    self.cpu = False
    self.first_losses: dict[str, float] = {}

  def _rows(self, model: dict[str, Any]) -> dict[str, Any]:
    """The rows of a model by name, those that were asked for if some were."""
    if not self.options.policy:
      return {name: _rows.ROWS[name] for name in model["rows"]}
    vit = model["kind"] == "vit"  # what mpx is measured on
    return {name: row for name, row in self.options.policy if vit or row.get("by") != "mpx"}

  def run(self) -> dict[str, Any]:
    """Everything that was asked for."""
    peaks = self.open_peaks()
    # What is known of the models is traced here, while the processes start and compile.
    tracing = concurrent.futures.ThreadPoolExecutor(1)
    self.figures = {name: tracing.submit(_figures, model) for name, model in self.models.items()}
    options, measures = self.options, self.options.measure or ["steps"]
    for what in measures:
      if what == "steps":
        self.steps(peaks)
      elif what == "products":
        self.need_peaks(peaks)
        models, squares = list(self.models.values()), _rows.PEAKS[options.size]
        _extra.products(self.report, models, self.worker, self.until, squares)
      else:
        _extra.largest_batch(self.report, self.models, self.row_worker, self.until)
      write(self.report, options.json)
    peaks.close()
    self.report["took_s"] = time.monotonic() - self.begun
    if "steps" in measures:
      self.report["targets"] = _summary.targets(self.report)
      print("\n".join(_summary.target_lines(self.report)), flush=True)
    print(f"took {self.report['took_s']:.0f} s of {60 * options.minutes:.0f}", flush=True)
    return self.report

  def open_peaks(self) -> Worker:
    """A process that will measure the peaks, and begins the report; ends the run if there is no GPU."""
    worker = self.worker({"measure": "peaks"} | _rows.PEAKS[self.options.size])
    first = worker.read(120)
    if "error" in first:
      sys.exit(f"JAX finds no device: {first['error']}")
    self.cpu = first["platform"] == "cpu"
    if first["platform"] not in ("gpu", "cuda", "rocm") and self.options.size != "tiny":
      worker.close()
      sys.exit(f"needs a GPU, and JAX finds {first['device']} here: `--size tiny` runs all of it on a CPU")
    if self.cpu:  # nothing that is measured means anything
      self.environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    self.memory = first["memory"]
    command = shlex.join(["gpu", *_kept(sys.argv[1:])])
    device = f"{first['device']}, {platform.machine()}"
    self.report: dict[str, Any] = origin(command, "flax", "optax", "mixed-precision-for-JAX", device=device)
    self.report |= {
      "size": self.options.size,
      "platform_version": first["platform_version"],
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
      "compiling": self.options.compiling,
      "cache": bool(self.options.cache),
      "models": {},
    }
    print(f"{self.report['device']}; {self.options.compiling} compile at once", flush=True)
    return worker

  def need_peaks(self, worker: Worker) -> None:
    """Measures the peaks by themselves, if no model has been measured."""
    if "peaks" in self.report:
      return
    left = lambda: self.until - time.monotonic()
    answers = [worker.ask(left(), word) for word in ("compile", "begin", "round", "round", "round")]
    if "error" in answers[-1]:
      sys.exit(f"no peaks could be measured: {answers[-1]['error']}")
    self.report["peaks"] = _medians(answers[2:])

  def worker(self, task: dict[str, Any]) -> Worker:
    """A process of JAX."""
    return Worker(sys.executable, "benchmarks.gpu._jax_rows", task, self.environment)

  def row_worker(self, model: dict[str, Any], name: str) -> Worker:
    """The process that trains a row."""
    row = model["rows"][name]
    task = _rows.task(model, row) | {"cpu": self.cpu}
    if row.get("by") != "torch":
      return self.worker(task)
    return Worker(self.options.torch_python, "benchmarks.gpu._torch_rows", task, {})

  def steps(self, peaks: Worker) -> None:
    """Trains every model; then, in what time is left, what there was none for or no memory."""
    for i, name in enumerate(self.models):
      rest = [model["weight"] for model in list(self.models.values())[i:]]
      until = time.monotonic() + (self.until - time.monotonic()) * rest[0] / sum(rest)
      self.stage(name, list(self.models[name]["rows"]), until, peaks if i == 0 else None)
    for name, model in self.models.items():
      rows = self.report["models"][name]["rows"]
      missing = [row for row in rows if _again(rows[row])]
      if missing and self.until - time.monotonic() > 30:
        again = [row for row in model["rows"] if row in (*missing, _rows.REFERENCE)]
        self.stage(name, again, self.until, None)

  def stage(self, name: str, rows: list[str], until: float, peaks: Worker | None) -> None:
    """Measures rows of a model, and adds what was found to the report."""
    model, begin = self.models[name], time.monotonic()
    print(f"{model['title']}, {until - begin:.0f} s for {len(rows)} rows", flush=True)
    again = name in self.report["models"]
    found = Stage(
      start=lambda row: self.row_worker(model, row),
      check=lambda row, said: self.check(name, row, said),
      label="again" if again else "first",
      compile_until=begin + (until - begin) * FOR_COMPILING,
      until=until,
      rounds=model["rounds"],
      compiling=self.options.compiling,
      started=2 * self.options.compiling,
      memory=self.memory and int(self.memory * (0.7 if again else 0.97)),
      reference=_rows.REFERENCE,
      companion=(PEAKS, peaks) if peaks else None,
    ).run(rows)
    measured = found.pop(PEAKS, {})
    if measured.get("rounds_s"):
      self.report["peaks"] = _medians(measured["rounds_s"])
    elif measured:
      print(f"no peaks: {measured.get('error') or measured.get('skipped')}", flush=True)
    if not again:
      keys = ("title", "kind", "sizes", "seq", "image", "batch", "steps")
      shown = {key: model[key] for key in keys if key in model}
      self.report["models"][name] = shown | self.figures[name].result()
    entry = self.report["models"][name]
    for row in rows:
      entry["rows"][row] = _summary.merge(entry["rows"].get(row), found[row])
      entry["rows"][row] |= {"peak": model["rows"][row]["peak"], "policy": model["rows"][row]["policy"]}
      if "torch" in found[row]:
        self.report["versions"]["torch"] = found[row]["torch"]
    _summary.summarise(self.report, entry)
    write(self.report, self.options.json)
    print("\n".join(_summary.lines(entry)), flush=True)

  def check(self, name: str, row: str, said: dict[str, Any]) -> str:
    """What is not as in the other rows of a model: the number of parameters, the first loss."""
    expected = None if row == PEAKS else self.figures[name].result()["parameters"]
    if expected and said.get("parameters", expected) != expected:
      return f"{said['parameters']} parameters, where the model has {expected}"
    if "first_loss" not in said:
      return ""
    if said["first_loss"] is None:
      return "the first loss is not finite"
    other = self.first_losses.setdefault(name, said["first_loss"])
    # Of other random numbers in PyTorch, and few of them in the tiny models.
    allowed = 0.1 if self.options.size == "full" else 0.5
    if abs(said["first_loss"] / other - 1) > allowed:
      return f"the first loss is {said['first_loss']:.3f}, where the other rows have {other:.3f}"
    return ""


def _figures(model: dict[str, Any]) -> dict[str, Any]:
  from benchmarks.gpu import _models

  fp8 = {name: row["policy"] for name, row in model["rows"].items() if row["peak"] == "float8"}
  found = _models.figures(_rows.task(model, _rows.ROWS["bf16"]), fp8)
  unit, units = _rows.units(model)
  return found | {"unit": unit, "units": units, "rows": {}}


def _again(row: dict[str, Any]) -> bool:
  """Whether a row is worth a second try."""
  return row.get("skipped") == OUT_OF_TIME["skipped"] or "memory" in row.get("error", "").lower()


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
  return {name: statistics.median(measured[name] for measured in rounds) for name in rounds[0]}


def _kept(given: list[str]) -> list[str]:
  """Arguments without the suite, and where its report, the cache and the other interpreter are."""
  apart = ("--json", "--torch-python", "--cache")
  kept, skip = [], False
  for argument in given[1:] if given[:1] == ["gpu"] else given:
    if not skip and not argument.startswith(apart):
      kept.append(argument)
    skip = argument in apart
  return kept
