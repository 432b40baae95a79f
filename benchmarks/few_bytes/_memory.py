"""Memory and traffic of an update, from the compiler of a device that need not be there."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks._record import compiler_figures, origin
from benchmarks.few_bytes._variants import VARIANTS, update_of
from mpjax.planner.compiled import module_proto, parse
from mpjax.planner.compiled._hlo import HloInstruction, start_of

WIDTH, LAYERS = 2048, 4
SHAPES = {
  f"layer{i}": {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "scale": (WIDTH,),
  }
  for i in range(LAYERS)
}
MOVE_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "opt-barrier")
ASYNCHRONOUS = ("copy-start", "slice")


def measure(target: str, device: Any) -> dict[str, Any]:
  """Returns the bytes a parameter of each variant: held, temporary and accessed."""
  shown = f"{device.device_kind}, described and not there"
  report = origin(f"few_bytes memory {target}", "optax", device=shown) | {"rows": []}
  sharding = SingleDeviceSharding(device)
  put = lambda tree: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)
  is_shape = lambda x: isinstance(x, tuple)
  count = sum(math.prod(shape) for shape in jax.tree.leaves(SHAPES, is_leaf=is_shape))

  def arrays(dtype: Any) -> Any:
    # What has one dimension stays float32, as in `bf16_lean`.
    one = lambda shape: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32)
    return jax.tree.map(one, SHAPES, is_leaf=is_shape)

  for name, (tx, dtype) in VARIANTS.items():
    params, grads = put(arrays(dtype)), put(arrays(jnp.float32))
    state = put(jax.eval_shape(tx.init, params))
    update = jax.jit(update_of(tx), donate_argnums=(0, 1))
    traced = update.trace(params, state, grads)
    compiled = traced.lower(lowering_platforms=(target,)).compile()
    figures = compiler_figures(compiled)
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(grads))
    row = {
      "name": name,
      "held": (figures["argument_bytes"] - gradients) / count,
      "temporaries": figures["temp_bytes"] / count,
      "accessed": main_memory_bytes(module_proto(compiled)) / count,
      "peak": figures["peak_bytes"] / count,
    }
    report["rows"].append(row)
    print(
      f"{name:32} held {row['held']:.3f} temporaries {row['temporaries']:.3f} accessed {row['accessed']:.2f} "
      "bytes a parameter",
      flush=True,
    )
  return report | {"parameters": count}


def main_memory_bytes(proto: bytes) -> int:
  """Returns what a compiled program without loops reads from the device's main memory, and writes to it.

  Operands and results of each kernel count where they are in that memory. What a TPU copies into the memory
  on its chip is read once, and what is computed from it there costs nothing more.

  Raises:
    ValueError: for an instruction whose operands do not say what it moves.
  """
  total = 0
  for instruction in parse(proto).entry.instructions:
    if instruction.op in MOVE_NOTHING or instruction.op.endswith("-start"):
      continue
    total += _in_main_memory(instruction)
    if instruction.op.endswith("-done"):
      start = start_of(instruction)
      runs = [start.op, *(called.root.op for called in start.called)]
      if not set(runs) & set(ASYNCHRONOUS):
        raise ValueError(f"{start.name}: expected {' or '.join(ASYNCHRONOUS)}, not {runs[-1]}")
      # A slice reads as much as it writes, and not the whole of its operand.
      if _in_main_memory(start.operands[0]):
        total += sum(shape.nbytes for shape in instruction.shapes)
    elif instruction.op in ("while", "conditional", "call"):
      raise ValueError(f"{instruction.name}: its operands do not say what a {instruction.op} moves")
    else:
      total += sum(map(_in_main_memory, instruction.operands))
  return total


def _in_main_memory(instruction: HloInstruction) -> int:
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)
