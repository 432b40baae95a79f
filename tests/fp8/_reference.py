"""FP8 by hand in float64 NumPy: rounding, scales and products."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax.fp8 import parse_recipe
from mpjax.products import Spec, fp8_dot_general, multiply_ragged, recipe_of_experts

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
E4M3_AMD, E5M2_AMD = "float8_e4m3fnuz", "float8_e5m2fnuz"
E4M3_TPU = "float8_e4m3b11fnuz"
# Bits of the fraction, exponent of the smallest normal number, largest number.
FORMATS = {
  E4M3: (3, -6, 448.0),
  E5M2: (2, -14, 57344.0),
  E4M3_AMD: (3, -7, 240.0),
  E5M2_AMD: (2, -15, 57344.0),
  E4M3_TPU: (3, -10, 30.0),
}
TINY = 2.0**-126  # the smallest normal float32
HUGE = float(np.finfo(np.float32).max)
# A third of the time to compile.
OPTIONS = {"xla_backend_optimization_level": 0}

MATMUL = (((1,), (0,)), ((), ()))
AMD = {"forward_dtype": "e4m3fnuz", "gradient_dtype": "e5m2fnuz"}
SAVED = {"saved_activations": "fp8"}
# Bounds that do not depend on the operands: of a product of normal numbers, relative to its norm.
FORWARD_ERROR, GRADIENT_ERROR = 0.05, 0.09


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
  """float64 `x` to the nearest number of a format, ties to even, saturated; NaN where it is not finite."""
  fraction, smallest, largest = FORMATS[dtype]
  x = np.asarray(x, np.float64)
  finite = np.clip(np.where(np.isfinite(x), x, 0), -largest, largest)
  exponent = np.frexp(finite)[1] - 1
  step = 2.0 ** (np.maximum(exponent, smallest) - fraction)
  return np.where(np.isfinite(x), np.rint(finite / step) * step, np.nan)


def scale_for(x: np.ndarray, dtype: str, margin: int = 0, pow2: bool = True) -> float:
  """The scale of a tensor: a float32, held in a Python float."""
  amax = float(np.max(np.abs(np.asarray(x, np.float64)), initial=0))
  if amax == 0 or not math.isfinite(amax):
    scale = 1.0
  else:
    scale = float(np.clip(FORMATS[dtype][2] * 2.0**-margin / amax, 2.0**-126, 2.0**126))
  return 2.0 ** (math.frexp(scale)[1] - 1) if pow2 else float(np.float32(scale))


def held(x: np.ndarray, scale: float, dtype: str) -> np.ndarray:
  """What `x` is after quantisation: float64."""
  scaled = np.asarray(x, np.float32) * np.float32(scale)
  return rounded(scaled.astype(np.float64), dtype) / scale


@dataclasses.dataclass(frozen=True)
class Product:
  """A `dot_general` by the letters of its dimensions; dimensions of one letter are one.

  Attributes:
    lhs: letters of the left operand's dimensions.
    rhs: letters of the right one's.
    batch: letters of the batch dimensions, in order.
    contracted: letters of the contracted dimensions, in order.
    sizes: size of each letter.
  """

  lhs: str
  rhs: str
  batch: str
  contracted: str
  sizes: dict[str, int]

  @property
  def out(self) -> str:
    """Letters of the result."""
    used = self.batch + self.contracted
    return self.batch + "".join(c for c in self.lhs + self.rhs if c not in used)

  @property
  def dims(self):
    """As `jax.lax.dot_general` wants them."""
    pair = lambda letters: tuple(tuple(side.index(c) for c in letters) for side in (self.lhs, self.rhs))
    return pair(self.contracted), pair(self.batch)

  def shape(self, letters: str) -> tuple[int, ...]:
    """Sizes of letters."""
    return tuple(self.sizes[c] for c in letters)


def check_product(out, spec: str, x, y, x_dtype: str, y_dtype: str, scales=(None, None), margin=0):
  """Fails where `out` is further from the einsum `spec` of x and y, rounded, than float32 sums explain.

  Args:
    out: the result, of any floating dtype.
    spec: as `np.einsum` takes it.
    x: finite float32.
    y: finite float32.
    x_dtype: the format that x goes through.
    y_dtype: that of y.
    scales: of x and y; `None`: from their amaxes.
    margin: as the recipe's.
  """
  narrow, out = jnp.finfo(out.dtype), np.asarray(out, np.float64)
  x_scale = scale_for(x, x_dtype, margin) if scales[0] is None else scales[0]
  y_scale = scale_for(y, y_dtype, margin) if scales[1] is None else scales[1]
  x, y = held(x, x_scale, x_dtype), held(y, y_scale, y_dtype)
  want, size = np.einsum(spec, x, y), np.einsum(spec, np.abs(x), np.abs(y))
  unit = 1 / (x_scale * y_scale)
  assert not np.isnan(out).any(), f"{np.isnan(out).sum()} NaN of finite operands, unit {unit:.3g}"
  if unit > HUGE:  # even products of the smallest FP8 numbers are large
    assert (out[size == 0] == 0).all()
    return
  inputs, result = spec.split("->")
  sizes = dict(zip(inputs.replace(",", ""), x.shape + y.shape, strict=True))
  terms = math.prod(n for letter, n in sizes.items() if letter not in result)
  # Sums, the unit and the output; what is below the smallest normal number may be flushed to 0.
  bound = (terms + 8) * 2.0**-24 * size + float(narrow.eps) / 2 * (1 + 1e-2) * np.abs(want)
  bound = bound + float(narrow.tiny) + (size if unit < TINY * 4 else 0)
  fits = np.abs(want) + bound < float(narrow.max)
  assert (np.abs(out - want)[fits] <= bound[fits]).all(), (
    f"{spec}: {np.max((np.abs(out - want) / bound)[fits]):.3g} times what arithmetic explains"
  )


def relative(x, reference) -> float:
  """The norm of the difference over that of the reference: arrays, or trees of them."""
  flat = lambda tree: np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in jax.tree.leaves(tree)])
  x, reference = flat(x), flat(reference)
  return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def bits(x) -> np.ndarray:
  """What is compared where every bit counts, the sign of zero too."""
  x = np.asarray(x)
  return x.view(f"u{x.dtype.itemsize}")


def flushed(x: np.ndarray) -> np.ndarray:
  """float32 without its subnormal numbers, which devices may take for zero."""
  return np.where(np.abs(x) < TINY, 0, x).astype(np.float32)


def compiled(fun):
  """`jax.jit` for small programs of which there are many."""
  return jax.jit(fun, compiler_options=OPTIONS)


def with_gradients(fun):
  """A function of (x, w, ct): the product and the gradients of both operands, compiled as one."""

  def run(x, w, ct):
    out, back = jax.vjp(fun, x, w)
    return out, *back(ct.astype(out.dtype))

  return compiled(run)


def lowered(fun, *args, platform):
  """The dtypes of each product of a program for a platform: (lhs, rhs, result)."""
  text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
  products = re.findall(r"(?:stablehlo\.(?:dot_general|convolution)|chlo\.ragged_dot)\b.* : (.*)", text)
  types = [re.findall(r"tensor<(?:\d+x)*(\w+)>", types) for types in products]
  return [(found[0], found[1], found[-1]) for found in types]


def normal(*shape, seed=0, scale=1.0):
  return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def matmul(x, w, recipe="current", **options):
  return fp8_dot_general(x, w, MATMUL, recipe, **options)


def ragged_dot(x, w, sizes, recipe="per_channel", *, out_dtype=None, native=None):
  """`jax.lax.ragged_dot` as autocast multiplies it, with the result in a dtype, by default that of x."""
  out = np.dtype(out_dtype or x.dtype)
  operands = _compat.vary_like(*[list(map(jnp.asarray, (x, w, sizes)))] * 2)
  closed = jax.make_jaxpr(jax.lax.ragged_dot)(operands[0].astype(out), operands[1].astype(out), operands[2])
  spec = Spec(recipe_of_experts(parse_recipe(recipe)), native=native)
  return multiply_ragged(closed.jaxpr.eqns[-1], operands, dataclasses.replace(spec, out_dtype=out))
