"""The stored second moment beside the float32 one: gradients that stay, shrink, or shrink in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks._record import origin

Arrays = dict[str, jax.Array]
# Of one tree of gradients by size: its first state, and a step of it; the stored second moments in float32.
Kept = tuple[Any, Callable[[Any, Arrays], Any], Callable[[Any], Arrays]]

SIZES = ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "1e-7")
DECAYS = (0.95, 0.999)
SHAPE, STEPS, SHRINK = (32, 128), 4000, 0.1
# 4000 steps; then 4000 in which all gradients, or every second entry's, are ten times smaller.
PHASES = ("steady", "after", "half")


def ours(dtype: str) -> Callable[[float, Arrays], Kept]:
  """Keeps Adam's moments by `mpjax.quantized_state`."""

  def keep(decay: float, params: Arrays) -> Kept:
    tx = mpjax.quantized_state(optax.scale_by_adam(b2=decay), dtype, min_size=0)
    return (
      tx.init(params),
      lambda state, g: tx.update(g, state)[1],
      lambda x: mpjax.optim.dequantize_state(x).nu,
    )

  return keep


def by_rule(
  encode: Callable[[jax.Array], Any], decode: Callable[[Any], jax.Array]
) -> Callable[[float, Arrays], Kept]:
  """Keeps the second moment alone, by a rule of others."""

  def keep(decay: float, params: Arrays) -> Kept:
    def step(state: dict[str, Any], grads: Arrays) -> dict[str, Any]:
      return {k: encode(decay * decode(state[k]) + (1 - decay) * g * g) for k, g in grads.items()}

    return (
      {k: encode(jnp.zeros_like(p)) for k, p in params.items()},
      step,
      lambda state: {k: decode(v) for k, v in state.items()},
    )

  return keep


def root_codes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the square roots in 8 bits, and a float16 scale for each 32 of them (arXiv 2602.23349)."""
  roots = jnp.sqrt(x).reshape(-1, 32)
  largest = roots.max(1, keepdims=True)
  codes = jnp.round(roots / jnp.where(largest > 0, largest, 1) * 255)
  return codes.astype(jnp.uint8), largest.astype(jnp.float16)


def from_root_codes(stored: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Returns what `root_codes` stored."""
  codes, scales = stored
  return ((codes.astype(jnp.float32) / 255 * scales.astype(jnp.float32)) ** 2).reshape(SHAPE)


FORMATS = {
  "int8": ours("int8"),
  "float8_e4m3fn": ours("float8_e4m3fn"),
  "bfloat16": ours("bfloat16"),
  "bfloat16, rounded to nearest": by_rule(
    lambda x: x.astype(jnp.bfloat16), lambda stored: stored.astype(jnp.float32)
  ),
  "roots, float16 scales of 32": by_rule(root_codes, from_root_codes),
}


def moments(kept: Callable[[float, Arrays], Kept], decay: float) -> list[dict[str, np.ndarray]]:
  """Returns the second moments after each of `PHASES`, by size of the gradients."""
  spread = jnp.exp(jax.random.normal(jax.random.key(0), SHAPE))
  sizes = {size: float(size) * spread for size in SIZES}
  first, step, read = kept(decay, sizes)

  def phase(state: Any, factor: jax.Array, key: jax.Array) -> Any:
    def one(state: Any, key: jax.Array) -> tuple[Any, None]:
      draw = jax.random.normal(key, SHAPE) * factor
      return step(state, {name: draw * size for name, size in sizes.items()}), None

    return jax.lax.scan(one, state, jax.random.split(key, STEPS))[0]

  run = jax.jit(phase)
  steady = run(first, jnp.ones(SHAPE), jax.random.key(1))
  after = run(steady, jnp.full(SHAPE, SHRINK), jax.random.key(2))
  half = run(steady, jnp.ones(SHAPE).at[:, ::2].set(SHRINK), jax.random.key(2))
  return [{k: np.asarray(v, np.float64) for k, v in read(state).items()} for state in (steady, after, half)]


def measure() -> dict[str, Any]:
  """Returns median, 1% and 99% of stored over exact, by format, decay and size of the gradients."""
  plain = by_rule(lambda x: x, lambda x: x)
  report = origin("few_bytes tracking", "jaxlib", "optax") | {"steps": STEPS, "shrink": SHRINK, "rows": []}
  for decay in DECAYS:
    exact = moments(plain, decay)
    for name, kept in FORMATS.items():
      found = moments(kept, decay)
      for size in SIZES:
        phases = {}
        for phase, stored, true in zip(PHASES, found, exact, strict=True):
          ratio = stored[size] / true[size]
          if phase == "half":
            ratio = ratio[:, ::2]  # of those that shrank
          low, median, high = np.quantile(ratio, (0.01, 0.5, 0.99))
          phases[phase] = {"median": median, "low": low, "high": high}
        report["rows"].append({"format": name, "b2": decay, "gradients": size, **phases})
        cells = (f"{k} {p['median']:8.3f} ({p['low']:.3g} .. {p['high']:.3g})" for k, p in phases.items())
        print(f"{name:30}{decay:6} {size} {'  '.join(cells)}", flush=True)
  return report
