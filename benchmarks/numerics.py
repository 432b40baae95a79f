"""What looking at the numbers costs: memory and time of an inspection, time of `numerics.every` in a run.

Memory: the largest peak of an inspection's programs beside that of the training step. Time: seconds of the
processor, all cores together, which other work on it changes least.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from benchmarks._runner import Row, markdown
from benchmarks._timing import Stepper, in_turns
from mpjax.numerics import Watcher, reference_state, reference_step
from mpjax.numerics._pass import passes
from mpjax.train import load_config, make_setup
from mpjax.zoo.models import GPT

PACKAGES = ("flax", "libtpu", "jax-cuda13-plugin")
TIMED = True
SHAPE: dict[str, Any] = {"vocab_size": 50304, "max_len": 1024, "dim": 768, "layers": 12, "heads": 12}
BATCH, EVERY, ROUNDS = 8, 500, 7


def rows() -> Iterator[Row]:
  """Memory by device, and time by config."""
  for target in ("h200", "v5e"):
    yield Row({"what": "memory", "where": target}, functools.partial(peaks, target))
  for case in (("inspection", "gpt_stdlib"), ("look", "gpt_stdlib"), ("look", "vit_digits")):
    yield Row(dict(zip(("what", "where"), case, strict=True)), functools.partial(seconds, *case))


def loss_fn(model: GPT, batch: Any) -> jax.Array:
  """Mean cross entropy."""
  logits = model(batch["tokens"][:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def peaks(target: str) -> dict[str, Any]:
  """Bytes of a step of a GPT of 124M parameters in bfloat16, and of its inspection."""
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), "bf16")
  state = jax.eval_shape(lambda: step.init(GPT(**SHAPE, mlp_ratio=4, rngs=nnx.Rngs(0))))
  batch = {"tokens": jax.ShapeDtypeStruct((BATCH, SHAPE["max_len"] + 1), jnp.int32)}
  peak = lambda run, state: mpjax.plan(run, state, batch, target=target, compile=True).peak
  # In float32 there is no optimiser in the state, and the step's own stays in memory.
  optimiser = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
  sides = [(step, state), (reference_step(step), reference_state(state))]
  own, wide = passes(sides, batch, updates=True)
  found = {"policy": peak(own.run, state), "float32": peak(wide.run, sides[1][1]) + optimiser}
  return {"step": peak(step, state), "passes": found}


def seconds(what: str, config: str) -> dict[str, Any]:
  """Of a step, and of an inspection or a look during training: the first, with its compilation, and again."""
  setup = make_setup(load_config(f"configs/{config}.yaml", ["policy=bf16", "mesh.data=1"]))
  step = Stepper(setup.step, setup.first_state(), setup.place(next(setup.data.train())))
  watcher = Watcher(setup.step)
  looks = {
    "inspection": lambda: mpjax.inspect_numerics(setup.step, step.state, [step.batch], advise=False).loss,
    "look": lambda: watcher.look(step.state, step.batch),
  }
  runs: dict[str, Callable[[], Any]] = {"step": step, "other": looks[what]}
  first = {}
  for name, run in runs.items():
    begin = time.process_time()
    jax.block_until_ready(run())
    first[name] = time.process_time() - begin
  again = in_turns(runs, ROUNDS, time.process_time)
  return {"first_s": first, "again_s": {name: statistics.median(times) for name, times in again.items()}}


def table(report: dict[str, Any]) -> str:
  """Training beside an inspection, and the ratio."""
  lines: list[tuple[str, float, float, str]] = []
  for row in report["rows"]:
    what, where = row["what"], row["where"]
    if what == "memory":
      lines.append((f"peak, {where}", row["step"] / 1e9, max(row["passes"].values()) / 1e9, "GB"))
      continue
    first, again = row["first_s"], row["again_s"]
    if what == "inspection":
      lines.append((f"first step and inspection, {where}", first["step"], first["other"], "s"))
      lines.append((f"later ones, {where}", again["step"], again["other"], "s"))
    else:
      lines.append((f"{EVERY} steps and a look, {where}", EVERY * again["step"], again["other"], "s"))
  cells = ([what, f"{a:.3g} {unit}", f"{b:.3g} {unit}", f"{b / a:.2g}"] for what, a, b, unit in lines)
  return markdown(["", "training", "inspection", "ratio"], cells)
