"""Padding of arrays in a TPU's memory, against layouts written out and against what the TPU's compiler chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.planner import get_target, tiled_bytes
from mpjax.planner.compiled import _compile as compilers
from mpjax.planner.compiled import _hlo

SIZE = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "bool": 1, "float8_e4m3fn": 1}

# Shape, then elements with padding by dtype's size in bytes, as the compiler's own layouts have them.
LAYOUTS = [
  ((), {4: 128, 2: 256, 1: 512}),
  ((1,), {4: 128, 2: 256, 1: 512}),
  ((100,), {4: 128, 2: 256, 1: 512}),
  ((130,), {4: 256, 2: 256, 1: 512}),
  ((260,), {4: 512, 2: 512, 1: 512}),
  ((700,), {4: 1024, 2: 1024, 1: 1024}),
  ((5000,), {4: 5120, 2: 5120, 1: 5120}),
  ((8, 128), {4: 1024, 2: 1024, 1: 1024}),
  ((100, 100), {4: 104 * 128, 2: 104 * 128, 1: 104 * 128}),
  ((100, 260), {4: 264 * 128, 2: 264 * 128, 1: 264 * 128}),  # columns first pads less
  ((260, 3), {4: 4 * 384, 2: 4 * 384, 1: 4 * 384}),
  ((1, 300), {4: 384, 2: 2 * 384, 1: 4 * 384}),
  ((2, 129), {4: 2 * 256, 2: 2 * 256, 1: 4 * 256}),
  ((3, 3, 16, 32), {4: 9 * 16 * 128, 2: 9 * 16 * 128, 1: 9 * 16 * 128}),
  ((4, 1024, 768), {4: 4 * 1024 * 768, 2: 4 * 1024 * 768, 1: 4 * 1024 * 768}),
  ((0, 5), {4: 0, 2: 0, 1: 0}),
]


@pytest.mark.parametrize(("shape", "elements"), LAYOUTS)
@pytest.mark.parametrize("dtype", SIZE)
def test_bytes_of_known_layouts(shape, elements, dtype):
  assert tiled_bytes(shape, jnp.dtype(dtype)) == elements[SIZE[dtype]] * SIZE[dtype]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from(list(SIZE)))
def test_padding_is_never_less_than_the_array_and_no_order_of_dimensions_beats_it(shape, dtype):
  size = tiled_bytes(tuple(shape), jnp.dtype(dtype))
  assert size >= np.prod(shape) * SIZE[dtype]
  assert size % (128 * SIZE[dtype]) == 0
  assert size == tiled_bytes(tuple(reversed(shape)), jnp.dtype(dtype))


def test_whole_tiles_have_no_padding():
  for shape in [(8, 128), (3, 16, 256), (1024,), (2, 5, 8, 128)]:
    assert tiled_bytes(shape, jnp.dtype("float32")) == np.prod(shape) * 4


def shapes_to_try():
  """Scalars, vectors, the shapes of small models, and a few of each rank at random."""
  rng = np.random.default_rng(0)
  drawn = [tuple(int(n) for n in rng.integers(1, 300 // rank, size=rank)) for rank in (2, 2, 3, 3, 4, 4)]
  return [shape for shape, _ in LAYOUTS if 0 not in shape] + [
    (256, 1),
    (7, 129),
    (3, 200),
    (4, 1, 300),
    *drawn,
  ]


@pytest.mark.slow
@pytest.mark.aot
def test_bytes_of_what_the_compiler_lays_out():
  target = get_target("v5e")
  if lacks := compilers.missing(target):
    pytest.skip(lacks)
  args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for dtype in SIZE for shape in shapes_to_try()]
  step = lambda *arrays: [~x if x.dtype == bool else x + x for x in arrays]
  program = compilers.compile_step(step, tuple(args), [], target)
  laid_out = _hlo.parse(program.text).parameters()
  assert [shape.dims for shape in laid_out] == [arg.shape for arg in args]
  wrong = [
    (arg.shape, arg.dtype.name, tiled_bytes(arg.shape, arg.dtype), shape.nbytes)
    for arg, shape in zip(args, laid_out, strict=True)
    if tiled_bytes(arg.shape, arg.dtype) != shape.nbytes
  ]
  assert not wrong
  assert program.arguments == sum(shape.nbytes for shape in laid_out)
