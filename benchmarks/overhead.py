"""What mixed precision costs on this CPU: the same training step by hand, by other libraries and by mpjax.

Every variant of a model and dtype runs in every round, in shuffled order. Its ratio to the hand-written step
of the same dtype without a loss scale is taken within the round: median and quartiles. Tracing and compiling
take turns, too, from empty caches. Temporaries and bytes accessed are the compiler's own figures. The ratios
tell of overhead alone: what half precision gains on an accelerator is another matter.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._overhead_steps import HAND, MODELS, POLICIES, batch_of, variants
from benchmarks._runner import Row, markdown, one
from benchmarks._timing import Stepper, compared, in_turns, shuffled

PACKAGES = ("flax", "optax", "jmp", "mixed-precision-for-JAX")
TIMED = True
ROUNDS, COMPILE_ROUNDS = 20, 1


def rows() -> Iterator[Row]:
  """A row for each model and dtype; all variants of it share a process."""
  for model, dtype in itertools.product(MODELS, POLICIES):
    yield Row({"model": model, "dtype": dtype}, functools.partial(figures, model, dtype))


def figures(name: str, dtype: str) -> dict[str, Any]:
  """Figures by variant."""
  task, inner = MODELS[name]
  params, batch = task.init(), batch_of(name)
  names = list(variants(name, dtype))
  compiled: dict[str, list[dict[str, float]]] = {variant: [] for variant in names}
  for number in range(COMPILE_ROUNDS + 1):  # the first does not count
    for variant in shuffled(names, number):
      compiled[variant].append(first_step(name, dtype, variant, params, batch))
  steppers = {}
  for variant, (init, step) in variants(name, dtype).items():
    state = init(jax.tree.map(jnp.copy, params))  # is donated
    steppers[variant] = Stepper(step, jax.tree.map(jnp.array, state), batch, inner)
  times = in_turns(steppers, ROUNDS)
  found = {}
  for variant in names:
    found[variant] = compared("step", times[variant], times[HAND])
    found[variant]["step_s"] /= inner
    rounds = compiled[variant][1:]
    found[variant] |= {figure: statistics.median(of[figure] for of in rounds) for figure in rounds[0]}
  return {"variants": found}


def first_step(model: str, dtype: str, variant: str, params: Any, batch: Any) -> dict[str, float]:
  """Seconds of tracing and compiling a step that was never seen, and what its compiler says."""
  jax.clear_caches()
  gc.collect()
  init, step = variants(model, dtype)[variant]
  state = jax.eval_shape(init, params)
  begin = time.perf_counter()
  lowered = step.trace(state, batch).lower()
  traced = time.perf_counter()
  program = lowered.compile()
  return {
    "trace_s": traced - begin,
    "compile_s": time.perf_counter() - traced,
    "temporaries": program.memory_analysis().temp_size_in_bytes,
    "accessed": program.cost_analysis()["bytes accessed"],
  }


COMPILED = {
  "temporaries, bytes accessed": (("temporaries", "accessed"), ("transformer", "few tokens")),
  "tracing, compiling": (("trace_s", "compile_s"), ("transformer",)),
}


def table(report: dict[str, Any]) -> str:
  """Ratios to the hand-written step: variants down, models across."""
  lines = []
  for dtype in POLICIES:
    of = {model: one(report, model=model, dtype=dtype)["variants"] for model in MODELS}
    for variant in of["transformer"]:
      cells = [_time(found[variant]) for found in of.values()]
      for figures, models in COMPILED.values():
        for found in (of[model] for model in models):
          cells.append(", ".join(f"{found[variant][name] / found[HAND][name]:.2f}" for name in figures))
      lines.append([f"{dtype}: {variant}", *cells])
  heads = [f"{what}: {model}" for what, (_, models) in COMPILED.items() for model in models]
  return markdown(["step", *(f"time: {model}" for model in MODELS), *heads], lines)


def _time(found: dict[str, float]) -> str:
  low, high = found["step_q25"], found["step_q75"]
  return f"{found['step_ratio']:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")
