"""How exact the gradient of a weight is by recipe, emulated, against float64.

    python scripts/bench.py fp8_errors [--rows N] [--dim N] [--json FILE]

The gradient of a weight is a product of activations and output gradients. In some activations one channel
of 64 is 30 times as large as the others, as language models have them; in some gradients entries have heavy
tails (Student's t with 3 degrees of freedom). The error is that of the whole matrix, relative to its norm.
The gain is the share of the true gradient in the result; values that are rounded to the nearest lose their
squared error of it. Exits with status 1 beyond the bounds.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from benchmarks._record import origin
from mpjax.fp8._scaling import scale_of

DIMS = (((1,), (0,)), ((), ()))
# The recipe, and the largest error.
RECIPES: dict[str, tuple[Any, float]] = {
  "current": ({"recipe": "current"}, 0.06),
  "delayed": ({"recipe": "delayed"}, 0.06),
  "per_channel": ({"recipe": "per_channel"}, 0.04),
  "mx": ({"recipe": "mx"}, 0.045),
  "nvfp4": ({"recipe": "nvfp4"}, 0.20),
  # Backward products have both operands in E5M2, which TPU v5 and v6 do not multiply by E4M3B11FNUZ.
  "current, E4M3B11FNUZ": ({"recipe": "current", "forward_dtype": "e4m3b11fnuz"}, 0.08),
  "current, E4M3B11FNUZ gradients, too": (
    {"recipe": "current", "forward_dtype": "e4m3b11fnuz", "gradient_dtype": "e4m3b11fnuz"},
    0.06,
  ),
}
LARGEST_LOSS = 0.01  # of the gain
CASES = {
  "normal": (False, False),
  "outlier channels": (True, False),
  "heavy tails": (False, True),
  "both": (True, True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--rows", type=int, default=2048)
  parser.add_argument("--dim", type=int, default=512)


def run(options: argparse.Namespace) -> dict[str, Any]:
  report = origin("fp8_errors") | {"rows": options.rows, "dim": options.dim, "cases": {}}
  for name, kind in CASES.items():
    x, w, g = draw(0, options.rows, options.dim, *kind)
    exact = x.astype(np.float64).T @ g.astype(np.float64)
    found = {"bf16": figures(in_bfloat16(x, g), exact)}
    # What delayed scaling has seen before.
    earlier = [jnp.float32(np.abs(a).max()) for a in draw(1, options.rows, options.dim, *kind)]
    for recipe, (fields, _) in RECIPES.items():
      found[recipe] = figures(gradient(x, w, g, fields, earlier), exact)
    report["cases"][name] = found
  print(table(report))
  beyond = [
    f"{recipe} ({name})"
    for name, found in report["cases"].items()
    for recipe, (_, most) in RECIPES.items()
    if found[recipe]["error"] > most or abs(found[recipe]["gain"] - 1) > LARGEST_LOSS
  ]
  if beyond:
    sys.exit(f"beyond the bounds: {', '.join(beyond)}")
  return report


def draw(seed: int, rows: int, dim: int, outliers: bool, tails: bool) -> list[np.ndarray]:
  """Activations [rows, dim], a weight [dim, dim] and output gradients [rows, dim], in float32."""
  rng = np.random.default_rng(seed)
  x, w = rng.standard_normal((rows, dim)), rng.standard_normal((dim, dim)) / dim**0.5
  if outliers:
    x[:, ::64] *= 30
  g = rng.standard_t(3, (rows, dim)) if tails else rng.standard_normal((rows, dim))
  return [a.astype(np.float32) for a in (x, w, g / rows)]


def in_bfloat16(x: np.ndarray, g: np.ndarray) -> jax.Array:
  """The gradient by a product of bfloat16 operands, in float32."""
  half = (jnp.asarray(a, jnp.bfloat16).astype(jnp.float32) for a in (x.T, g))
  return jnp.matmul(*half, precision="highest")


def gradient(
  x: np.ndarray, w: np.ndarray, g: np.ndarray, fields: dict[str, Any], earlier: list[jax.Array]
) -> jax.Array:
  """The gradient of a weight by a recipe."""
  recipe = mpjax.fp8.Recipe(**fields)
  formats = (recipe.forward, recipe.forward, recipe.gradient)
  lhs, rhs, ct = (scale_of(amax, dtype) for amax, dtype in zip(earlier, formats, strict=True))
  given = (lhs, rhs, ct) if recipe.recipe == "delayed" else None
  product = lambda x, w: mpjax.fp8_dot_general(x, w, DIMS, recipe, scales=given)
  return jax.jit(lambda x, w, g: jax.vjp(product, x, w)[1](g)[1])(x, w, g)


def figures(found: jax.Array, exact: np.ndarray) -> dict[str, float]:
  """Relative error, and the share of the exact matrix in the found one."""
  wide = np.asarray(found, np.float64)
  whole = np.sum(exact**2)
  return {
    "error": float(np.sqrt(np.sum((wide - exact) ** 2) / whole)),
    "gain": float(np.sum(wide * exact) / whole),
  }


def table(report: dict[str, Any]) -> str:
  """A row for each recipe: error and gain by case."""
  cases = report["cases"]
  lines = [f"| recipe | {' | '.join(cases)} | at most |", "|---" * (len(cases) + 2) + "|"]
  for recipe in ("bf16", *RECIPES):
    cells = [f"{found[recipe]['error']:.4f}, gain {found[recipe]['gain']:.4f}" for found in cases.values()]
    most = f"{RECIPES[recipe][1]:.3g}" if recipe in RECIPES else "-"
    lines.append(f"| {recipe} | {' | '.join(cells)} | {most} |")
  return "\n".join(lines)
