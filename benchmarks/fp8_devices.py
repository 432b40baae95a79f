"""What low precision costs and gains on each device, by its compiler, without the device.

The gradient of a layer and blocks `x + silu(x @ w1) @ w2` under bf16 and the recipes that a device has units
for: temporaries; on GPUs the share of the products' FLOPs whose operands are both below 16 bits; on TPUs the
compiler's estimate of cycles, without what has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from benchmarks._runner import Row, chosen, compile_for, markdown, memory
from mpjax.planner import get_target
from mpjax.planner._program import Product
from mpjax.planner.compiled._from_hlo import from_hlo
from mpjax.planner.compiled._hlo import HloComputation, numpy_name, parse

PACKAGES = ("libtpu", "jax-cuda13-plugin")
ROWS, NARROW, WIDE, BLOCKS = 8192, 2048, 8192, 2
# The options of each recipe; a name begins with its recipe.
ON_GPU = {"current": {}, "current, activations saved in FP8": {"saved_activations": "fp8"}}
ON_GPU |= {"delayed": {}, "per_channel": {}}
B11 = {"forward_dtype": "e4m3b11fnuz"}  # what TPUs multiply before the seventh generation
ON_TPU = {"current": B11 | {"gradient_dtype": "e4m3b11fnuz"}}
ON_TPU |= {"current, gradients in E5M2": B11, "delayed": B11}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
  **dict.fromkeys(("v5e", "v5p", "v6e"), ON_TPU),
  "tpu7x": {"current": {}, "delayed": {}, "per_channel": {}},
  "h200": ON_GPU,
  "b200": ON_GPU | {"mx": {}, "nvfp4": {"keep_last": 0.0}},
}
NO_ESTIMATE = 2**60


def rows() -> Iterator[Row]:
  """Every device under bf16 and its recipes."""
  for target, recipes in RECIPES.items():
    for name in ("bf16", *recipes):
      yield Row({"target": target, "policy": name}, functools.partial(figures, target, name))


def loss(params: Any, x: jax.Array) -> jax.Array:
  """The mean square of the last block's result; the first layer makes of data what lies between layers."""
  first, *blocks = params
  x = x @ first  # which no recipe quantises
  for w1, w2 in blocks:
    x = x + jax.nn.silu(x @ w1) @ w2
  return jnp.mean(x**2)


def figures(target: str, name: str) -> dict[str, Any]:
  """Memory, cycles and products of the gradient."""
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  params = [shape(NARROW, NARROW), *[(shape(NARROW, WIDE), shape(WIDE, NARROW))] * BLOCKS]
  args: tuple[Any, ...] = (params, shape(ROWS, NARROW))
  policy: Any = "bf16"
  if name != "bf16":
    recipe = {"recipe": name.partition(",")[0], **RECIPES[target][name]}
    policy = {"base": "fp8", "fp8": {"emulate": True, "last_layer": True, **recipe}}
  if name == "delayed":
    args += (jax.eval_shape(mpjax.init_fp8_state(loss, policy), *args),)
  of = lambda params, x, state=None: mpjax.autocast(loss, policy, fp8_state=state)(params, x)
  program = compile_for(target, jax.grad(of, (0, 2) if args[2:] else 0), *args)
  module = parse(program.proto)
  every = from_hlo(module, get_target(target).kind).each()
  products = [(product, times) for operation, times in every for product in operation.products]
  flops = lambda kept: sum(product.flops * times for product, times in kept)
  return memory(program) | {
    "cycles": cycles(module),
    "kernels": sorted({product.kernel for product, _ in products if product.flops}),
    "narrow": flops(row for row in products if is_narrow(row[0])) / flops(products),
  }


def cycles(computation: HloComputation) -> int:
  """The sum of what a TPU's compiler expects of instructions."""
  every = computation.instructions
  found = (int(one.config.get("window_config", {}).get("estimated_cycles", NO_ESTIMATE)) for one in every)
  inner = sum(cycles(called) for one in every for called in one.called)
  return inner + sum(estimate for estimate in found if estimate < NO_ESTIMATE)


def is_narrow(product: Product) -> bool:
  """Whether it is a GEMM with both operands below 16 bits."""
  bits = [mpjax.formats.narrow_bits(numpy_name(dtype)) for dtype in product.operands]
  return product.kernel not in ("loop", "fused") and all(bits)


def table(report: dict[str, Any]) -> str:
  """Temporaries, and a GPU's products below 16 bits or a TPU's cycles, by recipe and device."""
  names = dict.fromkeys(row["policy"] for row in report["rows"])
  lines = ([name, *(_cell(report, target, name) for target in RECIPES)] for name in names)
  return markdown(["policy", *RECIPES], lines)


def _cell(report: dict[str, Any], target: str, name: str) -> str:
  found = {row["policy"]: row for row in chosen(report, target=target)}
  if not {name, "bf16"} <= found.keys():
    return ""
  row, base = found[name], found["bf16"]
  if name == "bf16":
    return f"{row['temporaries'] / 1e6:.0f} MB"
  second = f"{row['cycles'] / base['cycles']:.2f}" if row["cycles"] else f"{row['narrow']:.0%}"
  if row["kernels"] != base["kernels"]:  # other libraries' kernels need other memory
    return f"-, {second}"
  return f"{row['temporaries'] / base['temporaries']:.2f}, {second}"
