"""What a loss scale costs in a compiled program.

A chain of 12 products of 2048 x 2048 with tanh between, and AdamW: the step without a loss scale, with
`mpjax.dynamic_loss_scale`, and with one that asks whether the gradients alone are finite, and not the updated
parameters. Bytes accessed are those of the compiler's cost model, which there is for the TPU alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks._runner import Row, compile_for, markdown, memory, one

PACKAGES = ("optax", "libtpu", "jax-cuda13-plugin")
TARGETS = ("v5e", "h200")
DTYPES = ("float32", "float16")  # bfloat16 takes what float16 takes
BATCHES = (256, 4096)
LAYERS, WIDTH = 12, 2048


def with_parameters(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """A transform that keeps the parameters in its state and passes the gradients on."""

  def update(grads: Any, state: Any, _: Any = None) -> Any:
    params, opt_state = state
    updates, opt_state = tx.update(grads, opt_state, params)
    return grads, (optax.apply_updates(params, updates), opt_state)

  return optax.GradientTransformation(lambda params: (params, tx.init(params)), update)


ADAMW = optax.adamw(1e-3)
STEPS = {
  "without": with_parameters(ADAMW),
  "dynamic_loss_scale": with_parameters(mpjax.dynamic_loss_scale(ADAMW)),
  "gradients alone": mpjax.dynamic_loss_scale(with_parameters(ADAMW)),  # to which parameters are state
}


def rows() -> Iterator[Row]:
  """The steps by device, dtype and batch."""
  for target, dtype, batch, step in itertools.product(TARGETS, DTYPES, BATCHES, STEPS):
    facts = {"target": target, "dtype": dtype, "batch": batch, "step": step}
    yield Row(facts, functools.partial(figures, **facts))


def figures(target: str, dtype: str, batch: int, step: str) -> dict[str, Any]:
  """Memory of a step."""
  tx = STEPS[step]

  def loss(params: Any, x: jax.Array) -> jax.Array:
    x = x.astype(dtype)
    for w in params:
      x = jnp.tanh(x @ w.astype(dtype))
    return (x.astype(jnp.float32) ** 2).mean()

  def update(state: Any, x: jax.Array) -> Any:
    params = getattr(state, "inner_state", state)[0]
    value, grads = mpjax.value_and_grad(loss, state)(params, x)
    return tx.update(grads, state)[1], value

  state = jax.eval_shape(tx.init, [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS)
  x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
  return memory(compile_for(target, update, state, x, donate=(0,)))


def table(report: dict[str, Any]) -> str:
  """Temporaries of the steps, and bytes accessed by those of the step without a loss scale."""
  lines = []
  for dtype, batch in itertools.product(DTYPES, BATCHES):
    cells = [dtype, batch]
    for target in TARGETS:
      found = [one(report, target=target, dtype=dtype, batch=batch, step=step) for step in STEPS]
      cells += [f"{row['temporaries'] / 1e6:.0f}" for row in found]
      if target == "v5e":
        cells += [f"{row['accessed'] / found[0]['accessed']:.2f}" for row in found[1:]]
    lines.append(cells)
  ways = ["scaled", "gradients alone"]
  heads = ["v5e: MB without", *ways, *(f"accessed, {way}" for way in ways), "H200: MB without", *ways]
  return markdown(["compute dtype", "rows", *heads], lines)
