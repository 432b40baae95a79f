"""Memory of an update, and of a whole step, by how weights and state of the optimiser are kept, compiled.

An update: of 201M parameters with float32 gradients; parameters of one dimension stay float32. Accessed: what
its kernels read from the device's main memory and write to it. A step: of a GPT of 101M parameters, 8 layers
1024 wide, 4 rows of 512 tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks._runner import ROOT, Row, compile_for, markdown, one, plan_figures
from mpjax.planner import get_target
from mpjax.planner.compiled._hlo import HloInstruction, parse, start_of
from mpjax.train import Planner, load_config

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
TARGETS = ("h200", "v5e")
ADAMW = optax.adamw(1e-3)
INT8 = mpjax.quantized_state(ADAMW)
# Name to (transform, dtype of the parameters).
UPDATES = {
  "optax.adamw": (ADAMW, jnp.float32),
  "state int8": (INT8, jnp.float32),
  "state float8_e4m3fn": (mpjax.quantized_state(ADAMW, "float8_e4m3fn"), jnp.float32),
  "state bfloat16": (mpjax.quantized_state(ADAMW, "bfloat16"), jnp.float32),
  "weights int8": (mpjax.master_weights(ADAMW, "int8"), jnp.bfloat16),
  "state int8, weights int8": (mpjax.master_weights(INT8, "int8"), jnp.bfloat16),
  "state int8, weights stochastic": (mpjax.master_weights(INT8, "stochastic"), jnp.bfloat16),
}
WIDTH = 2048
LAYER = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,)]
SHAPES = 4 * LAYER
PARAMETERS = sum(map(math.prod, SHAPES))
MOVE_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "opt-barrier")
STEPS = (("bf16", "islands"), ("bf16_lean", "islands"), ("bf16_lean", "blocks"))  # policy, recompute
SIZES = ("model.dim=1024", "model.layers=8", "model.heads=8", "data.seq_len=512", "data.batch_size=4")


def rows() -> Iterator[Row]:
  """The updates by device, then the steps."""
  for target, kept in itertools.product(TARGETS, UPDATES):
    yield Row({"target": target, "kept": kept}, functools.partial(update, target, kept))
  for policy, recompute in STEPS:
    facts = {"target": "h200", "kept": policy, "recompute": recompute}
    yield Row(facts, functools.partial(step, policy, recompute))


def update(target: str, kept: str) -> dict[str, Any]:
  """Bytes a parameter that an update holds, needs for a while, and accesses."""
  tx, dtype = UPDATES[kept]
  arrays = lambda dtype: [
    jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32) for shape in SHAPES
  ]

  def apply(params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, grads = arrays(dtype), arrays(jnp.float32)
  program = compile_for(target, apply, params, jax.eval_shape(tx.init, params), grads, donate=(0, 1))
  gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in grads)
  return {
    "held": (program.arguments - gradients) / PARAMETERS,
    "temporaries": program.temporaries / PARAMETERS,
    "accessed": main_memory_bytes(program.proto) / PARAMETERS,
  }


def step(policy: str, recompute: str) -> dict[str, Any]:
  """What a whole step takes."""
  config = load_config(str(ROOT / "configs" / "gpt_stdlib.yaml"), ["mesh.data=1", *SIZES])
  planner = Planner(config, get_target("h200"))
  return plan_figures(planner.plan(policy, recompute=recompute, compile=True))


def main_memory_bytes(proto: bytes) -> int:
  """What a compiled program reads from the device's main memory, and writes to it.

  Operands and results of each kernel count where they are in that memory. What a TPU copies into the memory
  on its chip is read once, and what is computed from it there costs nothing more.

  Raises:
    ValueError: for an instruction whose operands do not say what it moves, such as a loop.
  """
  total = 0
  for instruction in parse(proto).instructions:
    if instruction.op in MOVE_NOTHING or instruction.op.endswith("-start"):
      continue
    total += _in_main_memory(instruction)
    if not instruction.op.endswith("-done"):
      total += sum(map(_in_main_memory, instruction.operands))
      known = instruction.op not in ("while", "conditional", "call")
    else:  # a slice reads as much as it writes, and not the whole of its operand
      start = start_of(instruction)
      known = bool({start.op, *(called.root.op for called in start.called)} & {"copy-start", "slice"})
      total += sum(shape.nbytes for shape in instruction.shapes) if _in_main_memory(start.operands[0]) else 0
    if not known:
      raise ValueError(f"{instruction.proto.name}: its operands do not say what it moves")
  return total


def _in_main_memory(instruction: HloInstruction) -> int:
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)


def table(report: dict[str, Any]) -> str:
  """Bytes a parameter of the updates, then of the steps."""
  lines = []
  for kept in UPDATES:
    found = [one(report, target=target, kept=kept) for target in TARGETS]
    cells = [
      f"{row[key]:.{digits}f}" for row in found for key, digits in (("temporaries", 2), ("accessed", 1))
    ]
    lines.append([kept, f"{found[0]['held']:.2f}", *cells])
  heads = [f"{what}, {target}" for target in TARGETS for what in ("temporary", "accessed")]
  updates = markdown(["update", "held", *heads], lines)
  lines = []
  for row in report["rows"]:
    if "recompute" in row:
      sizes = (row["arguments"], row["temporaries"], row["peak"])
      lines.append([row["kept"], row["recompute"], *(f"{size / row['parameters']:.2f}" for size in sizes)])
  return f"{updates}\n\n{markdown(['step, h200', 'recompute', 'held', 'temporary', 'peak'], lines)}"
