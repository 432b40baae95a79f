"""What low precision costs and gains on each device, by its compiler, without the device.

The gradient of blocks `x + silu(x @ w1) @ w2` under bf16 and the recipes that a device has units for:
temporaries; on GPUs the share of the products' FLOPs whose operands are both below 16 bits; on TPUs the
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
from mpjax.planner.compiled import HloModule, KernelProduct, kernel_products, parse
from mpjax.planner.compiled._hlo import numpy_name

PACKAGES = ("libtpu", "jax-cuda13-plugin")
ROWS, NARROW, WIDE, BLOCKS = 8192, 2048, 8192, 2
B11 = "e4m3b11fnuz"  # what TPUs multiply before the seventh generation
ON_GPU = {
  "current": {"recipe": "current"},
  "current, activations saved in FP8": {"recipe": "current", "saved_activations": "fp8"},
  "delayed": {"recipe": "delayed"},
  "per_channel": {"recipe": "per_channel"},
}
ON_TPU = {
  "current": {"recipe": "current", "forward_dtype": B11, "gradient_dtype": B11},
  "current, gradients in E5M2": {"recipe": "current", "forward_dtype": B11},
  "delayed": {"recipe": "delayed", "forward_dtype": B11},
}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
  "h200": ON_GPU,
  "b200": ON_GPU | {"mx": {"recipe": "mx"}, "nvfp4": {"recipe": "nvfp4", "keep_last": 0.0}},
  "tpu7x": {name: ON_GPU[name] for name in ("current", "delayed", "per_channel")},
  **dict.fromkeys(("v6e", "v5p", "v5e"), ON_TPU),
}
NO_ESTIMATE = 2**60


def rows() -> Iterator[Row]:
  """Every device under bf16 and its recipes."""
  for target, recipes in RECIPES.items():
    for name in ("bf16", *recipes):
      yield Row({"target": target, "policy": name}, functools.partial(figures, target, name))


def loss(params: Any, x: jax.Array) -> jax.Array:
  """The mean square of the last block's result."""
  for w1, w2 in params:
    x = x + jax.nn.silu(x @ w1) @ w2
  return jnp.mean(x**2)


def figures(target: str, name: str) -> dict[str, Any]:
  """Memory, cycles and products of the gradient."""
  weights = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((NARROW, WIDE), (WIDE, NARROW))]
  args: tuple[Any, ...] = ([weights] * BLOCKS, jax.ShapeDtypeStruct((ROWS, NARROW), jnp.bfloat16))
  policy: Any = "bf16"
  if name != "bf16":
    recipe = {"emulate": True, "first_layer": True, "last_layer": True, **RECIPES[target][name]}
    policy = {"base": "fp8", "fp8": recipe}
  delayed = name == "delayed"
  if delayed:
    args += (jax.eval_shape(mpjax.init_fp8_state(loss, policy), *args),)

  def of(params: Any, x: jax.Array, state: Any = None) -> jax.Array:
    return mpjax.autocast(loss, policy, fp8_state=state)(params, x)

  program = compile_for(target, jax.grad(of, (0, 2) if delayed else 0), *args)
  module = parse(program.proto)
  products = kernel_products(module)
  narrow = sum(product.flops for product in products if is_narrow(product))
  return memory(program) | {
    "cycles": cycles(module),
    "kernels": sorted({product.kernel for product in products}),
    "narrow": narrow / sum(product.flops for product in products),
  }


def cycles(module: HloModule) -> int:
  """The sum of the estimates that a TPU's compiler notes beside instructions."""
  every = (one for computation in module.computations.values() for one in computation.instructions)
  found = (int(one.config.get("window_config", {}).get("estimated_cycles", NO_ESTIMATE)) for one in every)
  return sum(estimate for estimate in found if estimate < NO_ESTIMATE)


def is_narrow(product: KernelProduct) -> bool:
  """Whether it is a GEMM with both operands below 16 bits."""
  bits = [mpjax.formats.narrow_bits(numpy_name(dtype)) for dtype in product.dtypes]
  return product.kernel != "loop" and all(bits)


def table(report: dict[str, Any]) -> str:
  """Temporaries, and products below 16 bits or cycles, by recipe and device."""
  by_target = {t: {row["policy"]: row for row in chosen(report, target=t)} for t in RECIPES}
  lines = [
    [name, *(_cell(rows.get(name), rows.get("bf16")) for rows in by_target.values())]
    for name in dict.fromkeys(row["policy"] for row in report["rows"])
  ]
  return markdown(["policy", *RECIPES], lines)


def _cell(row: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
  if row is None or base is None:
    return ""
  if row is base:
    cycles = f", {row['cycles'] / 1e6:.1f} M cycles" if row["cycles"] else ""
    return f"{row['temporaries'] / 1e6:.0f} MB{cycles}"
  same = row["kernels"] == base["kernels"]  # other libraries' kernels need other memory
  ratio = f"{row['temporaries'] / base['temporaries']:.2f}" if same else "-"
  return (
    f"{ratio}, {row['cycles'] / base['cycles']:.2f}" if row["cycles"] else f"{ratio}, {row['narrow']:.0%}"
  )
