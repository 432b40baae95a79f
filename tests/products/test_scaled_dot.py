"""`mpjax.scaled_dot` against NumPy and ml_dtypes: values, derivatives, dimensions, what is lowered."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from tests.fp8 import _blocks_by_hand as by_hand
from tests.fp8._reference import bits, compiled, normal, relative, with_gradients

# The quick code generators of XLA for CPU do not round to FP8 alike in every version.
pytestmark = pytest.mark.optimised

FORMATS = pytest.mark.parametrize("format", by_hand.SIZES)
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


@FORMATS
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


@FORMATS
def test_products_whose_float32_sums_are_exact_are_so_to_the_bit(format):
  """A multiple of the identity picks what x is in its blocks; a few codes of two blocks give exact sums."""
  pick, size = compiled(of(format)), by_hand.SIZES[format]
  for magnitude in np.float32([1e-30, 1, 1e30]):
    x = operands()[0] * magnitude
    picked = pick(x, 6 * np.eye(96, dtype=np.float32))
    np.testing.assert_array_equal(bits(picked), bits((6 * by_hand.held(x, format) + 0.0).astype(np.float32)))
  rng = np.random.default_rng(5)
  grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  x, w = (rng.choice(np.r_[-grid, grid], shape) for shape in ((16, 2 * size), (2 * size, 32)))
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


@FORMATS
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


@FORMATS
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


@FORMATS
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
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    native_products = text.count('composite "xla.scaled_dot"')
    assert native_products == blocks, platform
    if not blocks:
      assert len(lines) >= 2
      operands = {t for line in lines for t in line.rpartition(" : (")[2].partition(") ->")[0].split(", ")}
      assert {t.rpartition("x")[2].rstrip(">") for t in operands} == {wide}, platform
