"""MX and NVFP4 blocks along the last dimension, and their products, in NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3, FP4, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
# Format of `scaled_dot`: elements of a block.
SIZES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
ELEMENTS = {"mxfp8": E4M3, "mxfp4": FP4}  # of MX; others go by their own name


def in_blocks(x, size):
  return np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, size)


def mx(x, dtype=E4M3):
  """Returns codes, and an E8M0 scale for every 32: the smallest power of two that keeps them in range."""
  blocks, largest = in_blocks(x, 32), float(ml_dtypes.finfo(dtype).max)
  amax = np.abs(blocks).max(-1).astype(np.float64)
  fraction, exponent = np.frexp(np.where((amax > 0) & (amax < np.inf), amax / largest, 1))
  unit = 2.0 ** np.clip(exponent - (fraction == 0.5), -126, 127)
  with np.errstate(invalid="ignore"):
    codes = np.clip(blocks / unit[..., None], -largest, largest).astype(np.float32).astype(dtype)
  scales = np.where(amax < np.inf, unit, np.nan).astype(np.float32).astype(E8M0)
  return codes.reshape(x.shape), scales


def nvfp4(x, squares=False):
  """Returns codes, an E4M3 scale for every 16 (or every 16 x 16), and a power of two for the tensor."""
  blocks = in_blocks(x, 16)
  amax = np.abs(blocks).max(-1)
  if squares:
    amax = np.repeat(amax.reshape(-1, 16, amax.shape[-1]).max(1), 16, 0).reshape(amax.shape)
  whole = float(amax.max(initial=0))
  known = 0 < whole < np.inf
  tensor = np.float32(2.0 ** np.clip(np.floor(np.log2(4 * 448 / whole)), -126, 126) if known else 1)
  with np.errstate(invalid="ignore", over="ignore"):
    scales = np.clip(amax * tensor / np.float32(6), np.float32(2.0**-9), np.float32(448))
    scales = np.where(amax < np.inf, scales, np.nan).astype(E4M3)
    factor = np.minimum(tensor / scales.astype(np.float32), np.float32(2.0**126))
    codes = np.clip(blocks * factor[..., None], -6, 6).astype(FP4)
  return codes.reshape(x.shape), scales, tensor


def held(x, format, squares=False):
  """Returns what [..., k] is once it is quantised, in float64; MX elements may go by the name of a dtype."""
  codes, scales, *tensor = (
    nvfp4(x, squares) if format == "nvfp4" else mx(x, ELEMENTS.get(format) or getattr(ml_dtypes, format))
  )
  blocks = codes.astype(np.float64).reshape(*scales.shape, -1) * scales.astype(np.float64)[..., None]
  return blocks.reshape(x.shape) / (tensor[0] if tensor else 1)


def held_along(x, axis, format, squares=False):
  """Returns what x is, quantised along an axis."""
  return np.moveaxis(held(np.ascontiguousarray(np.moveaxis(x, axis, -1)), format, squares), -1, axis)


def products(x, w, ct, format):
  """Returns x @ w and its gradients for ct, whose operands are in blocks along what each product sums."""
  of = lambda a, b: held_along(a, 1, format) @ held_along(b, 0, format)
  return of(x, w), of(ct, w.T), of(x.T, ct)


# A Hadamard matrix with random signs, over 4.
SIGNS = np.array([1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, 1, 1])
TWO = np.array([[1, 1], [1, -1]])
ROTATION = np.diag(SIGNS) @ np.kron(TWO, np.kron(TWO, np.kron(TWO, TWO))) / 4
