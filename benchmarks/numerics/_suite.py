"""What looking at the numbers costs: memory of an inspection, and time of `numerics.every` in a run.

    python scripts/bench.py numerics [--target h200] [--json FILE]     # memory, a GPT of 124M parameters
    python scripts/bench.py numerics --time [--json FILE]              # time, on this machine
    python scripts/bench.py numerics --inspect [--json FILE]           # time of `inspect_numerics`

Memory: the peaks of the three programs as the target's compiler says (`mpjax.plan`): the training step, the
pass under the policy, and the pass in float32, beside which the optimiser's state stays on the device. Time:
the median of steps and passes, interleaved, as a share of `EVERY` steps; compilation is reported by itself.
An inspection: of one batch without advice, the first time beside the first step, both with their compilation,
and again beside the median step, and beside what it cannot do without: the gradients under the policy and in
float32. These are seconds of the processor, all cores together, which other work on it changes least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from benchmarks._record import origin, write
from mpjax.numerics import inspection_programs
from mpjax.numerics._watcher import Watcher
from mpjax.planner import get_target
from mpjax.train import load_config, make_setup
from mpjax.zoo.models import GPT

SHAPE: dict[str, Any] = {"vocab_size": 50304, "max_len": 1024, "dim": 768, "layers": 12, "heads": 12}
COMMAND = "numerics"
BATCH, EVERY, ROUNDS = 8, 500, 7
POLICIES = ("bf16", "fp16")


def loss_fn(model: GPT, batch: Any) -> jax.Array:
  """Mean cross entropy."""
  logits = model(batch["tokens"][:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def memory(policy: str, target: str) -> dict[str, Any]:
  """Peaks in bytes of a policy's programs."""
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy)
  make = lambda: step.init(GPT(**SHAPE, mlp_ratio=4, rngs=nnx.Rngs(0)))
  state = jax.eval_shape(make)
  batch = {"tokens": jax.ShapeDtypeStruct((BATCH, SHAPE["max_len"] + 1), jnp.int32)}
  peak = lambda run, state: mpjax.plan(run, state, batch, target=target, compile=True).peak
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  training = peak(step, state)
  inspection = {}
  for name, (program, its_state) in inspection_programs(step, state, batch).items():
    # In float32 there is no optimiser in the state, and the step's own stays in memory.
    beside = 0 if name == "policy" else size(state.opt_state)
    inspection[name] = peak(program, its_state) + beside
  row = {"policy": policy, "parameters": sum(x.size for x in jax.tree.leaves(state.params)), "step": training}
  row |= {f"{name} pass": peak for name, peak in inspection.items()}
  row["ratio"] = max(inspection.values()) / training
  print({key: round(x / 1e9, 3) if isinstance(x, int) else x for key, x in row.items()}, flush=True)
  return row


def cost_in_time(config: str, policy: str) -> dict[str, Any]:
  """Seconds of a step and of a look at one, for a config of this repository."""
  setup = make_setup(load_config(f"configs/{config}.yaml", [f"policy={policy}", "mesh.data=1"]))
  state, batches = setup.first_state(), setup.data.train()
  batch = setup.place(next(batches))
  watcher = Watcher(setup.step)

  def timed(run: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin

  def step() -> Any:
    nonlocal state
    state, metrics = setup.step(state, batch)
    return metrics

  compiling = timed(step), timed(lambda: watcher.look(state, batch))
  steps, looks = [], []
  for _ in range(ROUNDS):
    steps.append(timed(step))
    looks.append(timed(lambda: watcher.look(state, batch)))
  row: dict[str, Any] = {"config": config, "policy": policy, "step_s": statistics.median(steps)}
  row |= {"look_s": statistics.median(looks), "first_step_s": compiling[0], "first_look_s": compiling[1]}
  row["share"] = row["look_s"] / (EVERY * row["step_s"])
  print(row, flush=True)
  return row


def cost_of_inspection(layers: int, policy: str) -> dict[str, Any]:
  """Seconds of a first and a second `inspect_numerics` of a GPT of so many layers, and of its steps."""
  setup = make_setup(load_config("configs/gpt_stdlib.yaml", [f"policy={policy}", f"model.layers={layers}"]))
  state, batches = setup.first_state(), setup.data.train()
  batch = setup.place(next(batches))

  def seconds(run: Any) -> float:
    begin = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - begin

  def step() -> Any:
    nonlocal state
    state, metrics = setup.step(state, batch)
    return metrics

  look = lambda: mpjax.inspect_numerics(setup.step, state, [batch], advise=False).loss
  again = lambda run: statistics.median(seconds(run) for _ in range(ROUNDS))
  row: dict[str, Any] = {"layers": layers, "policy": policy}
  row |= {"first_step_s": seconds(step), "first_look_s": seconds(look)}
  row |= {"step_s": again(step), "look_s": again(look)}
  wide = setup.step.with_policy("fp32")
  wide_state = wide.adopt(state, setup.step)
  gradients = lambda: (setup.step.gradients(state, batch), wide.gradients(wide_state, batch))
  seconds(gradients)
  row |= {"gradients_s": again(gradients)}
  row |= {"first": row["first_look_s"] / row["first_step_s"], "again": row["look_s"] / row["step_s"]}
  print(row, flush=True)
  return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--target", default="h200", help="as mpjax.plan takes it; v5e, h200, ...")
  parser.add_argument("--inspect", action="store_true", help="time of inspections in place of memory")
  parser.add_argument("--time", action="store_true", help="time on this machine in place of memory")


def run(options: argparse.Namespace) -> int:
  if options.inspect:
    rows = [cost_of_inspection(layers, "bf16") for layers in (2, 8)]
    report = origin(f"{COMMAND} --inspect", "flax") | {"rows": rows}
  elif options.time:
    configs = ("gpt_stdlib", "vit_digits", "resnet_digits")
    rows = [cost_in_time(config, policy) for config in configs for policy in POLICIES]
    report = origin(f"{COMMAND} --time", "flax") | {"every": EVERY, "rows": rows}
  else:
    jax.config.update("jax_platforms", "cpu")  # which traces; the target's compiler is a process of its own
    device = f"{get_target(options.target).device}, described and not there"
    report = origin(f"{COMMAND} --target {options.target}", "flax", device=device)
    report |= {"target": options.target, "batch": BATCH, "shape": SHAPE}
    report["rows"] = [memory(policy, options.target) for policy in POLICIES]
  write(report, options.json)
  return 0
