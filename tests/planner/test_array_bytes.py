"""Padding of arrays in a TPU's memory, against layouts written out."""

import jax.numpy as jnp
import numpy as np

from mpjax.planner import tiled_bytes

SIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "bool": 1, "float8_e4m3fn": 1}

# Shape, then elements with padding of dtypes of four bytes, two and one, as the compiler's own layouts have them.
LAYOUTS = [
  ((), 128, 256, 512),
  ((1,), 128, 256, 512),
  ((100,), 128, 256, 512),
  ((130,), 256, 256, 512),
  ((260,), 512, 512, 512),
  ((700,), 1024, 1024, 1024),
  ((5000,), 5120, 5120, 5120),
  ((8, 128), 1024, 1024, 1024),
  ((100, 100), 104 * 128, 104 * 128, 104 * 128),
  ((100, 260), 264 * 128, 264 * 128, 264 * 128),  # columns first pads less
  ((260, 3), 4 * 384, 4 * 384, 4 * 384),
  ((1, 300), 384, 2 * 384, 4 * 384),
  ((2, 129), 2 * 256, 2 * 256, 4 * 256),
  ((3, 3, 16, 32), 9 * 16 * 128, 9 * 16 * 128, 9 * 16 * 128),
  ((4, 1024, 768), 4 * 1024 * 768, 4 * 1024 * 768, 4 * 1024 * 768),
  ((0, 5), 0, 0, 0),
]


def test_bytes_of_known_layouts():
  for shape, *elements in LAYOUTS:
    for dtype, size in SIZES.items():
      want = dict(zip((4, 2, 1), elements, strict=True))[size] * size
      assert tiled_bytes(shape, jnp.dtype(dtype)) == want, (shape, dtype)
  for shape in [(8, 128), (3, 16, 256), (1024,), (2, 5, 8, 128)]:  # whole tiles
    assert tiled_bytes(shape, jnp.dtype("float32")) == np.prod(shape) * 4, shape
  for dtype, size in {"int4": 1 / 2, "float4_e2m1fn": 1 / 2, "int2": 1 / 4, "uint2": 1 / 4}.items():
    assert tiled_bytes((64, 256), jnp.dtype(dtype)) == 64 * 256 * size, dtype
