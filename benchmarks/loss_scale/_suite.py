"""What a loss scale costs in a program compiled for an H200 or a TPU v5e, without the device.

    python scripts/bench.py loss_scale v5e|h200 [--json FILE]

A chain of 12 products of 2048 x 2048 with tanh between, AdamW, parameters and state donated; the step with
`mpjax.dynamic_loss_scale` beside the same step without, in the same compute dtype, and beside one that asks
the gradients alone whether they are finite, and not what the optimiser makes of them. Temporary memory,
aliased bytes and instructions are the compiler's own; bytes accessed are its cost model's, which there is for
the TPU alone. `v5e` needs the extra plan-tpu, `h200` plan-cuda, and neither needs the device.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks._record import origin, write
from mpjax.loss_scale._transform import make_loss_scale
from mpjax.planner import Target, get_target
from mpjax.planner.compiled import compile_step, parse

LAYERS, WIDTH = 12, 2048
DTYPES = ("float32", "bfloat16", "float16")
BATCHES = (256, 1024, 4096)
TX = optax.adamw(1e-3)
WHOLE, GRADIENTS = "mpjax.dynamic_loss_scale", "gradients alone"


def steps(dtype: Any) -> dict[str, tuple[Any, Any]]:
  """Name to (`params -> state`, `(state, batch) -> (state, loss)`)."""
  scaled = {
    WHOLE: mpjax.dynamic_loss_scale(TX),
    # Zeros in place of the parameters after an update are finite.
    GRADIENTS: make_loss_scale(
      TX, mpjax.LossScaling(), skip_nonfinite=True, apply=lambda p, u: jnp.zeros([])
    ),
  }

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

  def with_scale(tx: optax.GradientTransformation) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
      params, opt_state = state

      def of(params: Any) -> Any:
        value = loss(params, x)
        return mpjax.scale_loss(value, opt_state), value

      (_, value), grads = jax.value_and_grad(of, has_aux=True)(params)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), value

    return (lambda p: (p, tx.init(p)), step)

  return {
    "bare": (lambda p: (p, TX.init(p)), bare),
    **{name: with_scale(tx) for name, tx in scaled.items()},
  }


def measure(target: Target, dtype: str, batch: int) -> dict[str, Any]:
  """The compiler's figures of the steps."""
  params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
  rows = {}
  for name, (init, step) in steps(jnp.dtype(dtype)).items():
    state = jax.eval_shape(init, params)
    leaves = jax.tree.leaves(state)
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    program = compile_step(step, (state, x), range(len(leaves)), target)
    rows[name] = {
      "temp_bytes": program.temporaries,
      "argument_bytes": program.arguments,
      "alias_bytes": program.aliases,
      "peak_bytes": program.peak,
      "bytes_accessed": program.accessed,
      "ops": sum(len(c.instructions) for c in parse(program.proto).computations.values()),
      "donated_array_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim),
    }
  return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("target", choices=("v5e", "h200"))


def run(options: argparse.Namespace) -> int:
  target = get_target(options.target)
  shown = f"{options.target}, described and not there"
  report: dict[str, Any] = origin(f"loss_scale {options.target}", "optax", device=shown) | {"rows": []}
  print(f"{'':26}{'temp MB bare':>14}{'scaled':>10}{'ratio':>8}{'aliased':>9}{'bytes':>8}{'ops':>7}")
  for dtype in DTYPES:
    for batch in BATCHES:
      rows = measure(target, dtype, batch)
      bare, scaled = rows["bare"], rows[WHOLE]
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
