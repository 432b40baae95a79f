"""Memory and traffic of an update, from the compiler of a device that need not be there."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks._record import compiler_figures, origin
from benchmarks.few_bytes._variants import VARIANTS, update_of

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
BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "f8e4m3fn": 1,
  "bf16": 2,
  "s16": 2,
  "u16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
}
MOVE_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


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
    accessed = figures["bytes_accessed"] or operands_and_results(compiled.as_text())
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(grads))
    row = {
      "name": name,
      "held": (figures["argument_bytes"] - gradients) / count,
      "temporaries": figures["temp_bytes"] / count,
      "accessed": accessed / count,
      "peak": figures["peak_bytes"] / count,
    }
    report["rows"].append(row)
    print(
      f"{name:32} held {row['held']:.3f} temporaries {row['temporaries']:.3f} accessed {row['accessed']:.2f} "
      "bytes a parameter",
      flush=True,
    )
  return report | {"parameters": count}


def operands_and_results(hlo: str) -> float:
  """Returns the bytes of operands and results of what runs in a compiled program's entry."""
  types: dict[str, str] = {}
  total = 0
  for line in hlo.split("ENTRY ")[1].splitlines()[1:]:
    found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
    if not found:
      continue
    name, type_, operation, rest = found.groups()
    types[name] = type_
    if operation not in MOVE_NOTHING:
      operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
      total += size(type_) + sum(size(types.get(operand, "")) for operand in operands)
  return total


def size(types: str) -> int:
  """Returns the bytes of the arrays in an HLO type."""
  arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
  return sum(
    BYTES.get(dtype, 0) * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape in arrays
  )
