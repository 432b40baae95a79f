"""Scales, casts and products by recipe, and `mpjax.scaled_dot`, against float64 NumPy and ml_dtypes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import named
from tests.fp8 import _blocks_by_hand as by_hand
from tests.fp8._programs import fp8
from tests.fp8._reference import (
  E4M3,
  E4M3_TPU,
  E5M2,
  FORMATS,
  bits,
  compiled,
  flushed,
  held,
  lowered,
  matmul,
  normal,
  relative,
  rounded,
  scale_for,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to FP8 alike in every version.
pytestmark = pytest.mark.optimised

# The scale and the cast of a tensor: a product with 1 shows them

BAD = (np.inf, -np.inf, np.nan)


def recipe(dtype, **options):
  """A recipe whose forward products are of a format: that of gradients has to be another."""
  other = {"gradient_dtype": dtype.replace("e5m2", "e4m3" if "fnuz" in dtype else "e4m3fn")}
  return {"recipe": "current", "forward_dtype": dtype, **(other if "e5m2" in dtype else {}), **options}


def column(x):
  return np.asarray(x)[:, None]


@compiled
def cast(x, scale):
  """What a column is in every format under a scale that is given."""
  one = jnp.float32(1)
  return {
    name: matmul(x, one[None, None], recipe(name, recipe="delayed"), scales=(scale, one, one))[:, 0]
    for name in FORMATS
  }


def test_the_reference_rounds_as_ml_dtypes_does():
  x = np.random.default_rng(0).normal(size=4096) * 10.0 ** np.linspace(-9, 6, 4096)
  for name, (_, _, largest) in FORMATS.items():
    numbers = np.append(x, [largest, -largest]).astype(np.float32)
    want = np.clip(numbers, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(rounded(numbers, name), want)
    assert float(jnp.finfo(name).max) == largest


def test_every_bfloat16_and_its_neighbours_round_as_by_hand():
  high = np.arange(2**16, dtype=np.uint32) << 16
  x = np.concatenate([high, high + 1, high + 0x8000, high + 0x7FFF, high + 0x8001, high + 0xFFFF])
  x = x.astype(np.uint32).view(np.float32)
  x = flushed(x[np.isfinite(x)])
  for name, got in cast(column(x), np.float32(1)).items():
    np.testing.assert_array_equal(got, rounded(x, name), err_msg=name)


def test_overflow_saturates_and_what_is_not_finite_becomes_nan():
  x = np.array([6e4, -6e4, *BAD, 0.0, -0.0], np.float32)
  for dtype, scale in itertools.product(("float32", "bfloat16", "float16"), np.float32([1, 1e30])):
    for name, got in cast(column(x).astype(getattr(ml_dtypes, dtype, dtype)), scale).items():
      largest = np.float32(np.float32(FORMATS[name][2] / scale).astype(got.dtype))
      np.testing.assert_array_equal(np.float32(got), [largest, -largest, *[np.nan] * 3, 0, 0])


@functools.cache
def by_own_scale(margin):
  """What a column is in every format under its own scale."""
  one = np.ones((1, 1), np.float32)
  return compiled(lambda x: {name: matmul(x, one, recipe(name, margin=margin))[:, 0] for name in FORMATS})


@pytest.mark.parametrize("margin", [0, 1, 7])
def test_a_scale_brings_the_largest_number_to_that_of_the_format_less_the_margin(margin):
  numbers = np.random.default_rng(0).uniform(-1, 1, 64)
  for amax in np.float32([1e-20, 1e-3, 1, 2, 448, 57344, 240, 1e20]):
    x = (np.append(numbers, 1) * amax).astype(np.float32)
    for name, got in by_own_scale(margin)(column(x)).items():
      want = held(x, scale_for(x, name, margin), name)
      np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"{name} {amax}")


def test_the_scale_of_what_is_not_finite_is_one():
  for bad in BAD:
    for name, got in by_own_scale(0)(column(np.float32([bad, 0.3]))).items():
      np.testing.assert_array_equal(got, [np.nan, rounded(np.float32(0.3), name)], err_msg=f"{name} {bad}")


# Products

run_of = functools.cache(lambda name: with_gradients(lambda x, w: matmul(x, w, name)))


def check(results, factors):
  """Asserts that results are products of factors, summed in float32."""
  for got, (a, b) in zip(results, factors, strict=True):
    assert (np.abs(np.asarray(got, np.float64) - a @ b) <= 2.0**-19 * (np.abs(a) @ np.abs(b)) + 1e-37).all()


# per_channel, and the format of TPU v5 and v6


def by_channel(x, axis, dtype):
  """What x is with a scale for the values along each line of an axis."""
  lines = np.moveaxis(x, axis, -1)
  own = [held(line, scale_for(line, dtype, pow2=False), dtype) for line in lines.reshape(-1, lines.shape[-1])]
  return np.moveaxis(np.reshape(own, lines.shape), -1, axis)


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize(("recipe", "held_along"), [("per_channel", by_channel), ("mx", by_hand.held_along)])
def test_what_is_summed_together_has_scales(recipe, held_along, gradient):
  spec = {"recipe": recipe, "gradient_dtype": gradient}
  x, w, ct = normal(32, 64), normal(64, 32, seed=1), normal(32, 32, seed=2)
  x *= 10.0 ** np.arange(-16, 16)[:, None].astype(np.float32)  # rows of all magnitudes
  ct /= 10.0 ** np.arange(-16, 16)[:, None].astype(np.float32)
  w[:, 3] = 0
  factors = (
    (held_along(x, 1, E4M3), held_along(w, 0, E4M3)),
    (held_along(ct, 1, gradient), held_along(w, 1, E4M3).T),
    (held_along(x, 0, E4M3).T, held_along(ct, 0, gradient)),
  )
  check(with_gradients(lambda x, w: matmul(x, w, spec))(x, w, ct), factors)


@pytest.mark.parametrize("saved", ["compute", "fp8"])
def test_e4m3b11fnuz_has_scales_for_its_range_and_two_operands_of_one_format(saved):
  """The units of TPU v5 and v6 multiply a format by itself: backward products are of E5M2 alone."""
  recipe = {"recipe": "current", "forward_dtype": "e4m3b11fnuz", "saved_activations": saved}
  x, w, ct = normal(32, 48), normal(48, 16, seed=1), normal(32, 16, seed=2, scale=1e-6)
  of = lambda x, dtype: held(x, scale_for(x, dtype), dtype)
  forward = of(x, E4M3_TPU), of(w, E4M3_TPU)
  again = lambda i: (
    held(forward[i], scale_for((x, w)[i], E4M3_TPU), E5M2) if saved == "fp8" else of((x, w)[i], E5M2)
  )
  factors = forward, (of(ct, E5M2), again(1).T), (again(0).T, of(ct, E5M2))
  check(with_gradients(lambda x, w: matmul(x, w, recipe))(x, w, ct), factors)
  # As a whole program that has its backward pass multiplies them, and a tangent.
  dims = (((1,), (1,)), ((), ()))
  alone = mpjax.fp8_dot_general(ct, w, dims, recipe, gradient_operand=(True, False))
  _, tangent = jax.jvp(lambda x: matmul(x, w, recipe), (x,), (x * 2,))
  of_tangent = of(x * 2, E5M2), again(1)
  check((alone, tangent), ((of(ct, E5M2), of(w, E5M2).T), of_tangent))


# nvfp4

GRID = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def codes(rng, *shape):
  """Numbers of E2M1, of which every 16 along the last dimension have the largest."""
  numbers = rng.choice(np.r_[-GRID, GRID], shape).astype(np.float32)
  numbers[..., ::16] = 6
  return numbers


def test_nvfp4_is_as_by_hand_where_rounding_at_random_has_no_choice():
  rng = np.random.default_rng(0)
  x, w = rng.integers(-9, 9, (64, 96)).astype(np.float32), normal(96, 48, seed=1)
  weight = by_hand.held(w, "nvfp4", squares=True)
  np.testing.assert_array_equal(weight, by_hand.held_along(w, 0, "nvfp4", squares=True))
  along_columns = codes(rng, 64, 48)
  out, d_x, _ = run_of("nvfp4")(x, w, along_columns)
  check((out, d_x), ((by_hand.held(x, "nvfp4"), weight), (along_columns.astype(np.float64), weight.T)))
  # A cotangent that the rotation turns into codes.
  turned = codes(rng, 48, 64)
  along_rows = (turned.reshape(48, 4, 16) @ by_hand.ROTATION.T).reshape(48, 64).T.astype(np.float32)
  _, _, d_w = run_of("nvfp4")(x, w, along_rows)
  rotated = (x.T.reshape(96, 4, 16) @ by_hand.ROTATION).reshape(96, 64).astype(np.float32)
  check((d_w,), ((by_hand.held(rotated, "nvfp4"), turned.T.astype(np.float64)),))


def test_gradients_of_nvfp4_are_right_on_average():
  """Equal rows of a cotangent are rounded independently: their mean is that of exact codes."""
  rows = 4096
  x, w = normal(rows, 16), normal(16, 64, seed=1)
  row = np.random.default_rng(2).standard_t(3, size=64).astype(np.float32)
  ct = np.broadcast_to(row, (rows, 64))
  d_x = np.asarray(run_of("nvfp4")(x, w, ct)[1], np.float64)
  want = row @ by_hand.held(w, "nvfp4", squares=True).T
  deviation = np.abs(d_x.mean(0) - want) / (d_x.std(0) / np.sqrt(rows))
  assert deviation.max() < 4
  assert (d_x.std(0) > 0).all()


def test_members_of_an_nvfp4_ensemble_have_scales_of_their_own():
  sizes = np.float32([1, 3e-6, 40])[:, None, None]
  x, w = normal(32, 64), normal(3, 64, 48, seed=1) * sizes
  for axis in (0, 1, 2):
    out = compiled(jax.vmap(lambda w: matmul(x, w, "nvfp4"), axis))(np.moveaxis(w, 0, axis))
    for i in range(3):
      np.testing.assert_allclose(out[i], compiled(lambda w: matmul(x, w, "nvfp4"))(w[i]), rtol=1e-5)


# backward: compute

FORWARD = ("current", "per_channel", "mx", "nvfp4")


@pytest.mark.parametrize("recipe", FORWARD)
def test_a_backward_pass_in_the_compute_dtype_is_that_of_bfloat16(recipe):
  x, w, ct = normal(32, 64), normal(64, 96, seed=1), normal(32, 96, seed=2)
  every = {"recipe": recipe, "first_layer": True, "last_layer": True, "keep_last": 0}

  def run(policy):
    def gradients(w, x):
      out, back = jax.vjp(mpjax.autocast(lambda w, x: x @ w, policy), w, x)
      return out, *back(ct)

    return compiled(gradients)(w, x), len(named("fp8_dot_general", gradients, w, x))

  (mixed, n), (quantised, of_fp8), (half, _) = map(
    run, (fp8(**every, backward="compute"), fp8(**every), "bf16")
  )
  assert (n, of_fp8) == (1, 3)
  np.testing.assert_array_equal(mixed[0], quantised[0])
  assert relative(mixed[0], half[0]) > 0.01
  for got, want in zip(mixed[1:], half[1:], strict=True):
    np.testing.assert_array_equal(got, want)


# scaled_dot

BLOCKS = pytest.mark.parametrize("format", by_hand.SIZES)
# Of a product of normal numbers and its gradients, relative to its norm.
ERRORS = {"mxfp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.16}


def of(format, **options):
  return lambda x, w: mpjax.scaled_dot(x, w, format=format, **options)


def operands(dtype="float32"):
  """x, w and a cotangent of several magnitudes, with blocks of zeros."""
  x, w, ct = normal(32, 96), normal(96, 64, seed=1, scale=0.1), normal(32, 64, seed=2, scale=3e-3)
  x *= 10.0 ** np.random.default_rng(3).uniform(-3, 1, x.shape).astype(np.float32)
  x[2, 32:64] = 0
  w[:, 5] = 0
  return [np.asarray(a).astype(getattr(ml_dtypes, dtype, dtype)) for a in (x, w, ct)]


def close(got, want, size):
  """Asserts that float32 sums of products of some size are near float64's."""
  assert (np.abs(np.asarray(got, np.float64) - want) <= 1e-6 * size + 1e-30).all()


# Values and derivatives


@BLOCKS
def test_values_and_gradients_are_those_of_blocks_by_hand(format):
  x, w, ct = operands()
  results = with_gradients(of(format))(x, w, ct)
  sizes = by_hand.products(abs(x), abs(w), abs(ct), format)
  for got, want, size in zip(results, by_hand.products(x, w, ct, format), sizes, strict=True):
    assert got.dtype == np.float32
    close(got, want, size)
  x, w, ct = normal(64, 64), normal(64, 64, seed=1), normal(64, 64, seed=2)
  for got, want in zip(with_gradients(of(format))(x, w, ct), (x @ w, ct @ w.T, x.T @ ct), strict=True):
    assert relative(got, want) < ERRORS[format]


@BLOCKS
def test_products_whose_float32_sums_are_exact_are_so_to_the_bit(format):
  """A multiple of the identity picks what x is in its blocks; a few codes of two blocks give exact sums."""
  pick, size = compiled(of(format)), by_hand.SIZES[format]
  for magnitude in np.float32([1e-30, 1, 1e30]):
    x = operands()[0] * magnitude
    picked = pick(x, 6 * np.eye(96, dtype=np.float32))
    np.testing.assert_array_equal(bits(picked), bits((6 * by_hand.held(x, format) + 0.0).astype(np.float32)))
  rng = np.random.default_rng(5)
  x, w = (rng.choice(np.r_[-GRID, GRID], shape) for shape in ((16, 2 * size), (2 * size, 32)))
  want = by_hand.held(x, format) @ by_hand.held_along(w, 0, format)
  np.testing.assert_array_equal(compiled(of(format))(x, w), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_operands_give_half_precision_and_float32_weights_float32_gradients(dtype):
  x, w, ct = operands(dtype)
  wide = [np.asarray(a, np.float32) for a in (x, w, ct)]
  want, sizes = by_hand.products(*wide, "mxfp8"), by_hand.products(*map(abs, wide), "mxfp8")
  narrow = jnp.finfo(dtype)
  for got, exact, size in zip(with_gradients(of("mxfp8"))(x, w, ct), want, sizes, strict=True):
    assert got.dtype == dtype
    bound = float(narrow.eps) * np.abs(exact) + 1e-6 * size + float(narrow.tiny)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()
  *_, of_weight = with_gradients(of("mxfp8"))(x, wide[1], ct)
  out = compiled(of("mxfp8", preferred_element_type=jnp.float32))(x, w)
  assert (of_weight.dtype, out.dtype) == (np.float32, np.float32)
  close(of_weight, want[2], sizes[2])
  close(out, want[0], sizes[0])


@BLOCKS
def test_what_is_not_finite_reaches_its_own_row_alone(format):
  for bad in (np.inf, -np.inf, np.nan):
    x = operands()[0]
    x[4, 70] = bad
    picked = np.asarray(compiled(of(format))(x, 6 * np.eye(96, dtype=np.float32)))
    assert np.isnan(picked[4]).all()
    want = 6 * by_hand.held(x, format)
    np.testing.assert_array_equal(np.delete(picked, 4, 0), np.delete(want, 4, 0).astype(np.float32))


def test_a_float16_result_is_scaled_back_before_it_is_rounded():
  x = np.full((16, 4096), 6e-5, np.float16)  # the codes alone sum to 448 * 448 * 4096
  for format in by_hand.SIZES:
    out = compiled(of(format, preferred_element_type=np.float16))(x, np.full((4096, 16), 10, np.float16))
    assert relative(out, np.full((16, 16), 6e-5 * 10 * 4096)) < ERRORS[format]


@BLOCKS
def test_tangents_are_products_of_blocks(format):
  x, w, _ = operands()
  dx, dw = normal(*x.shape, seed=7), normal(*w.shape, seed=8)
  _, tangent = compiled(lambda *p: jax.jvp(of(format), p[:2], p[2:]))(x, w, dx, dw)
  term = lambda a, b: by_hand.products(a, b, a[:, :64], format)[0]
  close(tangent, term(dx, w) + term(x, dw), term(abs(dx), abs(w)) + term(abs(x), abs(dw)))
  second = lambda w: jnp.sum(jnp.sin(of(format)(x, w)))
  assert np.isfinite(compiled(lambda w: jax.jvp(jax.grad(second), (w,), (dw,))[1])(w)).all()


# Dimensions


def test_any_dimension_numbers():
  x, w = normal(3, 64, 2, 16), normal(64, 5, 3, 32, seed=1)[..., :16]
  dims = (((1, 3), (0, 3)), ((0,), (2,)))
  for format in by_hand.SIZES:
    out = compiled(of(format, dimension_numbers=dims))(x, w)
    rows = by_hand.held(x.transpose(0, 2, 1, 3).reshape(3, 2, -1), format)
    columns = by_hand.held(w.transpose(2, 1, 0, 3).reshape(3, 5, -1), format)
    close(out, np.einsum("bik,bjk->bij", rows, columns), np.einsum("bik,bjk->bij", abs(rows), abs(columns)))
  # Without dimension numbers, the last dimension meets the last but one.
  x, w = normal(2, 16, 32), normal(2, 32, 16, seed=1)
  rows, columns = by_hand.held(x, "mxfp8"), by_hand.held_along(w, 1, "mxfp8")
  close(compiled(of("mxfp8"))(x, w), rows @ columns, abs(rows) @ abs(columns))


X, W = normal(32, 64), normal(64, 32)
WRONG = [
  ((X, W), {"format": "mxfp6"}, "'mxfp6': expected one of mxfp8, mxfp4, nvfp4"),
  ((X, W), {"format": "mxpf8"}, "did you mean 'mxfp8'"),
  ((X.astype(np.int32), W), {}, "lhs is int32.*jax.lax.scaled_dot"),
  ((X, W.astype(ml_dtypes.float8_e4m3fn)), {}, "rhs is float8_e4m3fn"),
  ((X, W), {"preferred_element_type": np.int32}, "preferred_element_type=int32"),
  ((X, W), {"preferred_element_type": ml_dtypes.float8_e4m3fn}, "preferred_element_type=float8_e4m3fn"),
  ((X[0], W), {}, r"\(64,\).*pass dimension_numbers"),
  ((X[:, :48], W[:48]), {}, "contracts 48 elements, expected a multiple of 32"),
  ((X[:, :40], W[:40]), {"format": "nvfp4"}, "contracts 40 elements, expected a multiple of 16"),
]


@pytest.mark.parametrize(("arguments", "options", "words"), WRONG)
def test_errors_say_what_is_wrong(arguments, options, words):
  with pytest.raises(ValueError, match=words):
    mpjax.scaled_dot(*arguments, **options)


def test_the_rows_that_a_backward_pass_contracts_are_named():
  with pytest.raises(ValueError, match="contracts 20 elements"):
    jax.eval_shape(jax.grad(lambda w: mpjax.scaled_dot(X[:20], w).sum()), W)


# What is lowered


@BLOCKS
def test_cuda_multiplies_blocks_and_other_platforms_what_they_stand_for(format):
  gradients = jax.grad(lambda x, w: jnp.sum(jnp.sin(of(format)(x, w))), (0, 1))
  args = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 96), jnp.bfloat16)
  for platform, native, blocks, wide in (
    ("cuda", None, 3, ""),
    ("cpu", None, 0, "f32"),
    ("tpu", None, 0, "bf16"),
    ("rocm", None, 0, "bf16"),
    ("cuda", False, 0, "bf16"),
  ):
    fun = gradients if native is None else jax.grad(lambda x, w: of(format, native=False)(x, w).sum(), (0, 1))
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count('composite "xla.scaled_dot"') == blocks, platform
    if not blocks:
      products = lowered(fun, *args, platform=platform)
      assert len(products) >= 2
      assert {dtype for *operands, _ in products for dtype in operands} == {wide}, platform
