"""What a training step of your config costs on this machine, by policy: time, compiling, memory.

    mpjax bench config my.yaml policy=fp32,bf16 [key=value ...] [--plugin FILE.py] [--rounds N] [--json FILE]

The policies take turns in shuffled order, a step each on its own state and the same batch; ratios to the
first policy are taken within a round. Memory is the compiler's figure for one step.
"""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

import jax
import rich.console
import rich.table

from benchmarks._runner import origin
from benchmarks._timing import Stepper, compared, in_turns
from mpjax._render.plain_text import bytes_text
from mpjax.cli._commands import Command, add_arguments as add_of_command, with_default
from mpjax.cli._shared import split_policies
from mpjax.train import load_config, load_plugins, make_setup
from mpjax.train.setup._experiment import Setup

POLICIES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the config, and how often to time it."""
  add_of_command(parser, Command("", overrides="dotted keys that override the file; policy=a,b to compare"))
  parser.add_argument("--rounds", type=int, default=20, help="of timed steps")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns figures of a step by policy."""
  if options.rounds < 1:
    raise SystemExit(f"--rounds {options.rounds}: expected a positive number")
  options = with_default(options)
  load_plugins(options.plugin)
  policies, overrides = split_policies(options.overrides)
  rows: dict[str, dict[str, Any]] = {}
  steppers: dict[str, Stepper] = {}
  for policy in policies or POLICIES:
    setup = make_setup(load_config(options.config, [*overrides, f"policy={policy}"]))
    steppers[policy], rows[policy] = _compiled(setup)
  times = in_turns(steppers, options.rounds)
  base = next(iter(times.values()))
  for policy, row in rows.items():
    row |= compared("step", times[policy], base)
  _show(rows)
  plugins = [word for name in options.plugin for word in ("--plugin", name)]
  words = ["config", options.config, *options.overrides, *plugins, "--rounds", str(options.rounds)]
  device = {"device": f"{jax.device_count()} x {jax.devices()[0].device_kind}"}
  return origin(shlex.join(words), "flax", "optax") | device | {"policies": rows}


def _compiled(setup: Setup) -> tuple[Stepper, dict[str, Any]]:
  """Returns what runs the step of a setup, compiled, and what its compiler says."""
  state = setup.first_state()
  batch = setup.place(next(setup.data.train(setup.rows)))
  start = time.perf_counter()
  step = setup.step.jitted.lower(state, batch).compile()
  seconds = time.perf_counter() - start
  memory: Any = step.memory_analysis()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  figures = {"compile_s": seconds, "peak_bytes": held + memory.temp_size_in_bytes}
  return Stepper(step, state, batch), figures


def _show(rows: dict[str, dict[str, Any]]) -> None:
  table = rich.table.Table(title="a training step")
  for title in ("policy", "step", "of the first", "compiling", "peak memory"):
    table.add_column(title, justify="left" if title == "policy" else "right")
  for policy, row in rows.items():
    quartiles = f"{row['step_ratio']:.2f} ({row['step_q25']:.2f} to {row['step_q75']:.2f})"
    step, compiling = f"{1e3 * row['step_s']:.2f} ms", f"{row['compile_s']:.1f} s"
    table.add_row(policy, step, quartiles, compiling, bytes_text(row["peak_bytes"]))
  rich.console.Console().print(table)
