"""What `mpjax.linear_cross_entropy` costs beside the loss of whole logits: memory, FLOPs, errors and time.

    python scripts/bench.py large_vocabulary memory cuda|tpu [--json FILE]
    python scripts/bench.py large_vocabulary errors [--json FILE]
    python scripts/bench.py large_vocabulary time [--rounds N] [--json FILE]

The program is loss and gradients by activations in the compute dtype and a float32 kernel, under autocast.
Whole logits go through optax's cross entropy of integer labels. `memory` compiles it for 8192 rows and
128,256 classes for an H200 or a TPU v5e, without the device; FLOPs are those of the products in the jaxpr,
loops counted by their trips. `errors` compares with float64, and `time` takes turns, both on this machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.autocast._suite import target_device  # isort: skip (sets JAX up for its target)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

import mpjax
from benchmarks._record import compiler_figures, origin
from mpjax.planner.analytic import make_graph

POLICIES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
ROWS, CLASSES, WIDTHS = 8192, 128_256, (1024, 4096)
SMALL = {"rows": 2048, "classes": 16_384, "width": 256}
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def whole(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
  """The loss of whole logits."""
  logits = (x @ kernel).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_chunks(rows: int) -> Loss:
  """The loss of `rows` rows at a time."""
  return lambda x, kernel, labels: mpjax.linear_cross_entropy(x, kernel, labels, rows=rows)


VARIANTS = {"whole logits": whole, **{f"{rows} rows": in_chunks(rows) for rows in (512, 1024, 2048)}}


def program(loss: Loss, policy: str, scale: float = 1.0) -> Callable[..., Any]:
  """Loss and gradients by x, in the compute dtype, and a float32 kernel."""
  under = mpjax.autocast(lambda x, kernel, labels: loss(x.astype(jnp.float32), kernel, labels), policy)
  return jax.value_and_grad(lambda *args: scale * under(*args), (0, 1))


def memory(target: str) -> dict[str, Any]:
  """Returns temporaries and FLOPs of each variant, compiled for a described device."""
  device = target_device(target)
  shown = f"{device.device_kind}, described and not there"
  report = origin(f"large_vocabulary memory {target}", "optax", device=shown) | {"rows": []}
  sharding = SingleDeviceSharding(device)
  like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  for policy, dtype in POLICIES.items():
    for width in WIDTHS:
      args = like((ROWS, width), dtype), like((width, CLASSES), jnp.float32), like((ROWS,), jnp.int32)
      base: dict[str, Any] = {}
      for name, loss in VARIANTS.items():
        traced = jax.jit(program(loss, policy)).trace(*args)
        figures = compiler_figures(traced.lower(lowering_platforms=(target,)).compile())
        row = {
          "policy": policy,
          "width": width,
          "name": name,
          "temp_bytes": figures["temp_bytes"],
          "peak_bytes": figures["peak_bytes"],
          "kernel_half_bytes": 0 if policy == "fp32" and target == "cuda" else 2 * width * CLASSES,
          "kernel_gradient_bytes": width * CLASSES * 4,
          "bytes_accessed": figures["bytes_accessed"],
          "flops": make_graph(traced.jaxpr).flops(),
        }
        base = base or row
        row["flops_ratio"] = row["flops"] / base["flops"]
        # On a TPU the gradient is a temporary before the loss scale is multiplied onto it.
        beside = (
          row["kernel_half_bytes"] + (policy == "fp16" and target == "tpu") * row["kernel_gradient_bytes"]
        )
        row["ratio"] = (row["temp_bytes"] - beside) / base["temp_bytes"] if loss is not whole else 1.0
        report["rows"].append(row)
        print(
          f"{policy} {width:5} {name:14} temporaries {row['temp_bytes'] / 1e6:7.0f} MB, beside the kernel's "
          f"{row['ratio']:.3f} of whole logits', FLOPs {row['flops_ratio']:.2f}",
          flush=True,
        )
  return report


def inputs(rows: int, classes: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Activations and a kernel whose logits are some units apart, and labels."""
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(width, classes)).astype(np.float32) * 2 / width**0.5
  return rng.normal(size=(rows, width)).astype(np.float32), kernel, rng.integers(0, classes, rows)


def errors() -> dict[str, Any]:
  """Returns relative errors against float64, in float16 with a loss scale of 2^16."""
  x, kernel, labels = inputs(**SMALL)
  report = origin("large_vocabulary errors", "jaxlib", "optax") | SMALL | {"errors": []}
  for policy, dtype in POLICIES.items():
    rounded = jnp.asarray(x, dtype)
    exact = _in_float64(np.asarray(rounded, np.float64), kernel.astype(np.float64), labels)
    scale = 2.0**16 if policy == "fp16" else 1.0
    for name in ("whole logits", "512 rows"):
      loss, (of_x, of_kernel) = jax.jit(program(VARIANTS[name], policy, scale))(rounded, kernel, labels)
      got = [np.asarray(a, np.float64) / scale for a in (loss, of_x, of_kernel)]
      pairs = zip(("loss", "x", "kernel"), got, exact, strict=True)
      row = {key: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for key, a, b in pairs}
      report["errors"].append({"policy": policy, "name": name, **row})
      print(policy, name, row, flush=True)
  return report


def _in_float64(x: np.ndarray, kernel: np.ndarray, labels: np.ndarray) -> list[Any]:
  """The loss and its gradients by x and kernel."""
  logits = x @ kernel
  logits -= logits.max(-1, keepdims=True)
  log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  rows = np.arange(len(x))
  slope = np.exp(log_softmax)
  slope[rows, labels] -= 1
  slope /= len(x)
  return [-log_softmax[rows, labels].mean(), slope @ kernel.T, x.T @ slope]


def timing(rounds: int) -> dict[str, Any]:
  """Returns seconds of each variant by policy, taken in turns."""
  x, kernel, labels = inputs(**SMALL)
  report = origin(f"large_vocabulary time --rounds {rounds}", "jaxlib", "optax") | SMALL | {"times": []}
  for policy in ("fp32", "bf16"):
    args = (jnp.asarray(x, POLICIES[policy]), jnp.asarray(kernel), jnp.asarray(labels))
    compiled = {
      name: jax.jit(program(loss, policy)).lower(*args).compile() for name, loss in VARIANTS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for i in range(rounds + 1):
      for name in random.Random(i).sample(list(compiled), len(compiled)):
        begin = time.perf_counter()
        jax.block_until_ready(compiled[name](*args))
        seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
      ratios = [a / b for a, b in zip(times[1:], seconds["whole logits"][1:], strict=True)]
      row = {"policy": policy, "name": name, "least_s": min(times[1:]), "ratio": statistics.median(ratios)}
      row["least_ratio"] = min(times[1:]) / min(seconds["whole logits"][1:])
      report["times"].append(row)
      print(
        f"{policy} {name:14} {row['least_s']:.3f} s, {row['least_ratio']:.2f} of whole logits", flush=True
      )
  return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what is measured, and what that takes."""
  parser.add_argument("measure", choices=("memory", "errors", "time"))
  parser.add_argument("target", choices=("cuda", "tpu"), nargs="?", help="of memory: a device to compile for")
  parser.add_argument("--rounds", type=int, default=9, help="of time (9)")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the report."""
  if options.measure == "errors":
    return errors()
  if options.measure == "time":
    return timing(options.rounds)
  if options.target is None:
    sys.exit("memory needs the device to compile for: memory cuda, or memory tpu")
  return memory(options.target)
