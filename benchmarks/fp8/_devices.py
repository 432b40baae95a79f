"""What low precision costs and gains on each device, by its compiler, without the device.

    python scripts/bench.py fp8_devices --target h200|b200|v5e|v5p|v6e|tpu7x [--no-triton] [--blocks N]
      [--recipe NAME] [--json FILE]

The gradient of blocks `x + silu(x @ w1) @ w2` (8192 rows, 2048 to 8192 wide) under `mpjax.autocast`, by
recipe and bf16: temporaries, which products have operands below 16 bits (GPUs: read from the optimised HLO),
the kinds of matrix instructions in the PTX (B200), and the compiler's own estimate of cycles (TPUs; what
carries none is left out). Needs the packages of the extra plan-cuda or plan-tpu. Autotuning needs a GPU and
is off.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import shlex
import sys
import tempfile
from typing import Any

# Read when the compilers start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
if "h200" in sys.argv or "b200" in sys.argv:
  os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")
if "--no-triton" in sys.argv:
  os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"
if "b200" in sys.argv:
  os.environ["XLA_FLAGS"] += (
    f" --xla_dump_to={tempfile.gettempdir()}/ptx-{os.getpid()} --xla_gpu_dump_llvmir --xla_dump_emitter_re=.*"
  )

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import mpjax
from benchmarks._record import compiler_figures, origin, write
from mpjax.planner import get_target
from mpjax.planner.compiled import KernelProduct, kernel_products, module_proto, parse
from mpjax.planner.compiled._hlo import numpy_name

_DUMP = pathlib.Path(tempfile.gettempdir(), f"ptx-{os.getpid()}")
ROWS, NARROW, WIDE = 8192, 2048, 8192
B11 = {"forward_dtype": "e4m3b11fnuz"}
RECIPES: dict[str, dict[str, Any]] = {
  "current": {"recipe": "current"},
  "current, saved in FP8": {"recipe": "current", "saved_activations": "fp8"},
  "delayed": {"recipe": "delayed"},
  "per_channel": {"recipe": "per_channel"},
  "mx": {"recipe": "mx"},
  "nvfp4": {"recipe": "nvfp4", "keep_last": 0.0},
  "current, E4M3B11FNUZ": {"recipe": "current", **B11},
  "current, E4M3B11FNUZ, gradients too": {"recipe": "current", **B11, "gradient_dtype": "e4m3b11fnuz"},
  "delayed, E4M3B11FNUZ": {"recipe": "delayed", **B11},
  "current, E4M3B11FNUZ, backward: compute": {"recipe": "current", **B11, "backward": "compute"},
}
_FP8 = ("current", "current, saved in FP8", "delayed", "per_channel")
_TPU_BEFORE_7 = tuple(name for name in RECIPES if "B11" in name)
OF_TARGET = {
  "h200": _FP8,
  "b200": (*_FP8, "mx", "nvfp4"),
  "tpu7x": ("current", "delayed", "per_channel"),
  **dict.fromkeys(("v5e", "v5p", "v6e"), _TPU_BEFORE_7),
}
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_NO_ESTIMATE = 2**60
_INSTRUCTION = re.compile(r"(tcgen05\.mma\.[\w.:]*|wgmma\.mma_async\.[\w.:]*|mma\.sync\.[\w.:]*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--target", choices=tuple(OF_TARGET), required=True)
  parser.add_argument("--no-triton", action="store_true", help="products by cuBLAS alone")
  parser.add_argument("--recipe", choices=tuple(RECIPES), action="append", help="leave the others out")
  parser.add_argument("--blocks", type=int, help="default: 4 on a GPU, 2 on a TPU")


def loss(params: Any, x: jax.Array) -> jax.Array:
  for w1, w2 in params:
    x = x + jax.nn.silu(x @ w1) @ w2
  return jnp.mean(x**2)


def run(options: argparse.Namespace) -> dict[str, Any]:
  target = get_target(options.target)
  on_gpu = target.kind == "gpu"
  if on_gpu:
    described = {"platform": "cuda", "topology": target.topology, "target_config": target.gpu_description()}
  else:
    described = {"platform": "tpu", "topology_name": target.topology}
  device = topologies.get_topology_desc(**described).devices[0]
  blocks = options.blocks or (4 if on_gpu else 2)
  put = jax.sharding.SingleDeviceSharding(device)
  shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=put)
  params, x = [(shaped(NARROW, WIDE), shaped(WIDE, NARROW))] * blocks, shaped(ROWS, NARROW)
  command = shlex.join(without_json(sys.argv[1:]))
  report = origin(command, device=f"{target.device}, described and not there") | {
    "blocks": blocks,
    "policies": {},
  }
  rows = report["policies"]
  for name in ("bf16", *(options.recipe or OF_TARGET[options.target])):
    policy: Any = "bf16"
    if name != "bf16":
      policy = {
        "base": "fp8",
        "fp8": {"emulate": True, "first_layer": True, "last_layer": True, **RECIPES[name]},
      }
    rows[name] = measure(policy, params, x, put, on_gpu)
    for figure in ("temp_bytes", "cycles"):
      if figure in rows[name]:
        rows[name][f"{figure}_ratio"] = rows[name][figure] / rows["bf16"][figure]
    print(name, {key: value for key, value in rows[name].items() if key != "instructions"}, flush=True)
    write(report, options.json)
  return report


def measure(policy: Any, params: Any, x: Any, put: Any, on_gpu: bool) -> dict[str, Any]:
  """The compiler's figures of the gradient under a policy."""
  delayed = policy != "bf16" and policy["fp8"]["recipe"] == "delayed"
  state: tuple[Any, ...] = ()
  if delayed:
    made = jax.eval_shape(mpjax.init_fp8_state(loss, policy), params, x)
    state = (jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=put), made),)

  def of(params: Any, x: Any, state: Any = None) -> jax.Array:
    return mpjax.autocast(loss, policy, fp8_state=state)(params, x)

  before = {path.name for path in _DUMP.glob("*.ptx")}
  gradient = jax.grad(of, argnums=(0, 2) if delayed else 0)
  compiled = jax.jit(gradient).lower(params, x, *state).compile()
  row = compiler_figures(compiled)
  if on_gpu:
    found = kernel_products(parse(module_proto(compiled)))
    row["share_below_16_bits"] = sum(p.flops for p in found if is_narrow(p)) / sum(p.flops for p in found)
    kernels = [path for path in _DUMP.glob("*.ptx") if path.name not in before]
    counts = collections.Counter(
      kind for path in kernels for kind in set(_INSTRUCTION.findall(path.read_text()))
    )
    row["instructions"] = {
      re.sub(r"\.sync\.aligned|\.cta_group::\d", "", kind): n for kind, n in sorted(counts.items())
    }
  else:
    row["cycles"] = sum(c for c in map(int, _CYCLES.findall(compiled.as_text() or "")) if c < _NO_ESTIMATE)
  return row


def is_narrow(product: KernelProduct) -> bool:
  """Whether it is a GEMM with both operands below 16 bits."""
  return product.kernel != "loop" and all(
    mpjax.formats.narrow_bits(numpy_name(dtype)) for dtype in product.dtypes
  )


def without_json(arguments: list[str]) -> list[str]:
  """A command line without where its report went."""
  if "--json" in arguments:
    at = arguments.index("--json")
    return arguments[:at] + arguments[at + 2 :]
  return [argument for argument in arguments if not argument.startswith("--json=")]
