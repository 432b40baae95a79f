"""What a loss scale costs in a program compiled for an H200 or a TPU v5e, without the device.

    python scripts/bench.py loss_scale tpu|cuda [--json FILE]

A chain of 12 products of 2048 x 2048 with tanh between, AdamW, parameters and state donated; the step with
`mpjax.dynamic_loss_scale` beside the same step without, in the same compute dtype. Temporary memory, aliased
bytes and instructions are the compiler's own; bytes accessed are its cost model's, which there is for the
TPU alone. `tpu` needs the package libtpu; `cuda` needs jax-cuda13-pjrt and jax-cuda13-plugin of JAX's own
version, nvidia-cuda-nvcc and nvidia-nvvm, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

# Read when the compilers start: a described device is not a backend.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
if "cuda" in sys.argv:
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks._record import compiler_figures, origin, write
from mpjax.planner import get_target

LAYERS, WIDTH = 12, 2048
DTYPES = ("float32", "bfloat16", "float16")
BATCHES = (256, 1024, 4096)
TX = optax.adamw(1e-3)


def described(target: str) -> Any:
  """A topology of devices that need not be there."""
  if target == "tpu":
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  h200 = get_target("h200")
  return topologies.get_topology_desc(
    platform="cuda", topology=h200.topology, target_config=h200.gpu_description()
  )


def steps(dtype: Any) -> dict[str, tuple[Any, Any]]:
  """Name to (`params -> state`, `(state, batch) -> (state, loss)`)."""
  scaled = mpjax.dynamic_loss_scale(TX)

  def loss(params: Any, x: jax.Array) -> jax.Array:
    x = x.astype(dtype)
    for w in params:
      x = jnp.tanh(x @ w.astype(dtype))
    return (x.astype(jnp.float32) ** 2).mean()

  def bare(state: Any, x: jax.Array) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  def with_scale(state: Any, x: jax.Array) -> Any:
    params, opt_state = state

    def of(params: Any) -> Any:
      value = loss(params, x)
      return mpjax.scale_loss(value, opt_state), value

    (_, value), grads = jax.value_and_grad(of, has_aux=True)(params)
    updates, opt_state = scaled.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return {
    "bare": (lambda p: (p, TX.init(p)), bare),
    "mpjax.dynamic_loss_scale": (lambda p: (p, scaled.init(p)), with_scale),
  }


def measure(sharding: Any, dtype: str, batch: int) -> dict[str, Any]:
  """The compiler's figures of both steps."""
  put = lambda tree: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)
  params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
  rows = {}
  for name, (init, step) in steps(jnp.dtype(dtype)).items():
    state = put(jax.eval_shape(init, params))
    x = put(jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))
    compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    rows[name] = compiler_figures(compiled) | {
      "donated_array_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in arrays),
    }
  return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("target", choices=("tpu", "cuda"))


def run(options: argparse.Namespace) -> int:
  device = described(options.target).devices[0]
  sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
  shown = f"{device.device_kind}, described and not there"
  report: dict[str, Any] = origin(f"loss_scale {options.target}", "optax", device=shown) | {"rows": []}
  print(f"{'':26}{'temp MB bare':>14}{'scaled':>10}{'ratio':>8}{'aliased':>9}{'bytes':>8}{'ops':>7}")
  for dtype in DTYPES:
    for batch in BATCHES:
      rows = measure(sharding, dtype, batch)
      bare, scaled = rows.values()
      report["rows"].append({"dtype": dtype, "batch": batch, **rows})
      ratio = lambda key, bare=bare, scaled=scaled: scaled[key] / bare[key] if bare[key] else float("nan")
      aliased = scaled["alias_bytes"] >= scaled["donated_array_bytes"]
      title = f"{dtype}, batch {batch}"
      print(
        f"{title:26}{bare['temp_bytes'] / 1e6:14.1f}{scaled['temp_bytes'] / 1e6:10.1f}"
        f"{ratio('temp_bytes'):8.3f}{'all' if aliased else 'NOT':>9}{ratio('bytes_accessed'):8.3f}"
        f"{ratio('ops'):7.2f}",
        flush=True,
      )
  write(report, options.json)
  return 0
