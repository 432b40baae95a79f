"""What mixed precision costs: the same training step by hand, by other libraries and by mpjax, side by side.

    python scripts/bench.py overhead [--target here|v5e|h200] [--model NAME] [--dtype NAME] [--rounds N]
      [--compile-rounds N] [--keep-freed-memory] [--json FILE]

Here: every variant of a model and dtype runs in every round, in shuffled order, and its ratio to the
hand-written step of the same dtype (without a loss scale) is taken within the round; medians with quartiles.
Tracing and compiling likewise, from empty caches. Memory, bytes accessed and instructions are the compiler's
own. On a CPU the ratios tell of overhead alone: what half precision gains is another matter. For a target
that need not be there the steps are compiled in larger sizes, and memory and bytes are reported.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks._record import compiler_figures, origin, write
from benchmarks.overhead import _steps, _tables
from benchmarks.overhead._models import LARGE, SMALL, Model
from mpjax.planner import Target, get_target, missing
from mpjax.planner.compiled import CompileError, compile_step, parse

PACKAGES = ("flax", "optax", "jmp", "mixed-precision-for-JAX", "keras")
DTYPES = ("float32", "bfloat16", "float16")
TRACED = ("transformer", "vit", "mlp")  # the others are the same programs in other sizes
IMPORTS = {"jax, flax, optax, jmp": "import jax, flax, optax, jmp", "mpjax": "import mpjax"}

tables = _tables.tables
pictures = _tables.pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--target", default="here", help="here (timed), or a described device: v5e, h200, ...")
  parser.add_argument("--model", choices=SMALL, action="append", help="leave the others out; may repeat")
  parser.add_argument("--dtype", choices=DTYPES, action="append", help="leave the others out; may repeat")
  parser.add_argument("--rounds", type=int, default=30, help="of timed steps")
  parser.add_argument("--compile-rounds", type=int, default=3, help="of tracing and compiling; 0 for none")
  parser.add_argument(
    "--keep-freed-memory", action="store_true", help="have the C library keep what is freed (Linux)"
  )


def run(options: argparse.Namespace) -> dict[str, Any]:
  try:
    target = get_target(options.target)
  except ValueError as error:
    raise SystemExit(f"--target {options.target}: {error}") from None
  if options.rounds < 1 or options.compile_rounds < 0:
    raise SystemExit("--rounds is at least 1 and --compile-rounds at least 0")
  dtypes = options.dtype or DTYPES
  report = origin(f"overhead {arguments(options)}".strip(), *PACKAGES)
  report |= {"target": target.name, "models": {}}
  if not target.is_here:
    report["device"] = f"{target.name}, described and not there"
    refused = missing(target)
    if refused:
      raise SystemExit(refused)
  if options.keep_freed_memory and not keep_freed_memory():
    raise SystemExit("--keep-freed-memory: the allocator of this system cannot be told to")
  for name, model in (SMALL if target.is_here else LARGE).items():
    if options.model and name not in options.model:
      continue
    rows: dict[str, Any] = {"title": model.title, "bound": model.bound, "dtypes": {}}
    report["models"][name] = rows
    for dtype in dtypes:
      if target.is_here:
        found = measure(model, dtype, options.rounds, options.compile_rounds if name in TRACED else 0)
      else:
        found = compile_for(model, dtype, target)
      rows["dtypes"][dtype] = found
      write(report, options.json)  # nothing is lost if a later one is interrupted
      _tables.show(model.title, dtype, found)
  if target.is_here and not options.model:
    report["import"] = time_imports(max(2, options.rounds // 2))
  print(_tables.targets(report))
  return report


def arguments(options: argparse.Namespace) -> str:
  """The command line that was given."""
  words = [] if options.target == "here" else ["--target", options.target]
  for flag in ("model", "dtype"):
    words += [word for name in getattr(options, flag) or () for word in (f"--{flag}", name)]
  if options.target == "here":
    words += ["--rounds", str(options.rounds), "--compile-rounds", str(options.compile_rounds)]
  return " ".join([*words, *(["--keep-freed-memory"] if options.keep_freed_memory else [])])


def measure(model: Model, dtype: str, rounds: int, compile_rounds: int) -> dict[str, dict[str, Any]]:
  """Figures by variant of steps that run here; the first is the base."""
  init, _, data = model.build()
  params, batch = init(), data()
  platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
  variants = functools.partial(_steps.variants, platform=platform)
  names = list(variants(model, dtype))
  phases: dict[str, list[dict[str, float]]] = {name: [] for name in names}
  for i in range(compile_rounds):
    for name in shuffled(names, i):
      made = functools.partial(lambda name: variants(model, dtype)[name], name)
      phases[name].append(first_step(made, params, batch))
  rows: dict[str, dict[str, Any]] = {}
  runs = {}
  for name, (start, step) in variants(model, dtype).items():
    step = scanned(step, model.scanned) if model.scanned else step
    state = jax.tree.map(jax.numpy.array, start(jax.tree.map(jax.numpy.copy, params)))
    rows[name] = compiler_figures(step.lower(state, batch).compile())
    runs[name] = Runner(step, state, batch)
    runs[name](2)
  times: dict[str, list[float]] = {name: [] for name in names}
  for i in range(rounds):
    for name in shuffled(names, i):
      times[name].append(runs[name](model.inner) / model.inner)
  base = names[0]
  for name, row in rows.items():
    row |= compared("step", times[name], times[base])
    for phase in phases[name][0] if compile_rounds else ():
      row |= compared(phase, [t[phase] for t in phases[name]], [t[phase] for t in phases[base]])
  return against(rows)


def compile_for(model: Model, dtype: str, target: Target) -> dict[str, dict[str, Any]]:
  """Figures by variant of steps compiled for a device that need not be there."""
  init, _, data = model.build()
  params, batch = jax.eval_shape(init), jax.eval_shape(data)
  rows: dict[str, dict[str, Any]] = {}
  platform = {"gpu": "cuda"}.get(target.kind, target.kind)
  for name, (start, step) in _steps.variants(model, dtype, platform).items():
    state = jax.eval_shape(start, params)
    donated = range(len(jax.tree.leaves(state)))
    try:
      program = compile_step(step, (state, batch), donated, target)
    except CompileError as error:
      rows[name] = {"error": str(error)}
      print(f"  {name}: {error}", flush=True)
      continue
    rows[name] = {
      "temp_bytes": program.temporaries,
      "peak_bytes": program.arguments + program.outputs - program.aliases + program.temporaries,
      "bytes_accessed": program.accessed,
      "ops": sum(len(c.instructions) for c in parse(program.proto).computations.values()),
    }
    print(f"  {name}: {program.seconds:.0f} s", flush=True)
  return against(rows)


def against(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """`rows` with the compiler's figures as ratios to the first."""
  base = next(iter(rows.values()))
  for row in rows.values():
    for figure in ("temp_bytes", "peak_bytes", "bytes_accessed", "ops"):
      if row.get(figure) and base.get(figure):
        row[f"{figure}_ratio"] = row[figure] / base[figure]
  return rows


def compared(what: str, times: list[float], base: list[float]) -> dict[str, float]:
  """Median seconds, and the median and quartiles of the ratios within the rounds."""
  ratios = [a / b for a, b in zip(times, base, strict=True)]
  low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
  seconds = statistics.median(times)
  return {f"{what}_s": seconds, f"{what}_ratio": middle, f"{what}_q25": low, f"{what}_q75": high}


def shuffled(names: Iterable[str], seed: int) -> list[str]:
  order = list(names)
  random.Random(seed).shuffle(order)
  return order


def first_step(make: Callable[[], Any], params: Any, batch: Any) -> dict[str, float]:
  """Seconds of tracing and compiling a step that was never seen, from empty caches."""
  jax.clear_caches()
  gc.collect()
  start, step = make()
  state = jax.eval_shape(start, params)
  begin = time.perf_counter()
  lowered = step.trace(state, batch).lower()
  traced = time.perf_counter()
  lowered.compile()
  return {"trace": traced - begin, "compile": time.perf_counter() - traced}


def scanned(step: Any, length: int) -> Any:
  """A program of many steps."""
  body = lambda batch: lambda state, _: step(state, batch)
  run = lambda state, batch: jax.lax.scan(body(batch), state, None, length=length)
  return jax.jit(run, donate_argnums=0)


class Runner:
  """Runs a step on its own state and returns the seconds that n steps took."""

  def __init__(self, step: Any, state: Any, batch: Any):
    self.step, self.state, self.batch = step, state, batch

  def __call__(self, n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
      self.state, _ = self.step(self.state, self.batch)
    jax.block_until_ready(self.state)
    return time.perf_counter() - start


def time_imports(rounds: int) -> dict[str, dict[str, float]]:
  """Seconds that fresh interpreters take to import mpjax, and what it is built on, in turn."""
  times: dict[str, list[float]] = {name: [] for name in IMPORTS}
  for i in range(rounds + 1):
    for name in shuffled(IMPORTS, i):
      start = time.perf_counter()
      subprocess.run([sys.executable, "-c", IMPORTS[name]], check=True, env=os.environ)
      times[name].append(time.perf_counter() - start)
  counted = {name: seconds[1:] for name, seconds in times.items()}  # the first reads the disk
  base = next(iter(counted.values()))
  return {name: compared("import", seconds, base) for name, seconds in counted.items()}


def keep_freed_memory() -> bool:
  """Tells the C library to keep what is freed; whether it understood.

  By default it asks the kernel for each block over 32 MB and gives it back in every step.
  """
  if not sys.platform.startswith("linux"):
    return False
  trim_threshold, mmap_max = -1, -4
  libc = ctypes.CDLL(None)
  return bool(libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1))
