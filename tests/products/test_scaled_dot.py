"""`mpjax.scaled_dot` against NumPy and ml_dtypes: values, derivatives, transforms, meshes, what is lowered."""

import functools

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

P = jax.sharding.PartitionSpec
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
  x, size = operands()[0], by_hand.SIZES[format]
  picked = compiled(of(format))(x, 6 * np.eye(96, dtype=np.float32))
  np.testing.assert_array_equal(bits(picked), bits((6 * by_hand.held(x, format) + 0.0).astype(np.float32)))
  rng = np.random.default_rng(5)
  grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  x, w = (rng.choice(np.r_[-grid, grid], shape) for shape in ((16, 2 * size), (2 * size, 32)))
  want = by_hand.held(x, format) @ by_hand.held_along(w, 0, format)
  np.testing.assert_array_equal(compiled(of(format))(x, w), want)


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_operands_give_half_precision_and_float32_weights_float32_gradients(format, dtype):
  x, w, ct = operands(dtype)
  wide = [np.asarray(a, np.float32) for a in (x, w, ct)]
  want = by_hand.products(*wide, format)
  sizes = by_hand.products(*map(abs, wide), format)
  step = float(jnp.finfo(dtype).eps)
  results = with_gradients(of(format))(x, w, ct)
  of_mixed = with_gradients(of(format))(x, wide[1], ct)
  assert [r.dtype for r in (*results, *of_mixed)] == [dtype] * 5 + ["float32"]
  for got, exact, size in zip((*results, of_mixed[2]), (*want, want[2]), (*sizes, sizes[2]), strict=True):
    tiny = float(jnp.finfo(got.dtype).tiny) if got.dtype == np.float16 else 0
    bound = (0 if got.dtype == np.float32 else step) * np.abs(exact) + 1e-6 * size + tiny
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()
  out = compiled(of(format, preferred_element_type=jnp.float32))(x, w)
  assert out.dtype == np.float32
  close(out, want[0], sizes[0])


def test_a_float16_result_is_scaled_back_before_it_is_rounded():
  x = np.full((16, 4096), 6e-5, np.float16)  # the codes alone sum to 448 * 448 * 4096
  for format in by_hand.SIZES:
    out = compiled(of(format, preferred_element_type=np.float16))(x, np.full((4096, 16), 10, np.float16))
    assert relative(out, np.full((16, 16), 6e-5 * 10 * 4096)) < ERRORS[format]


@FORMATS
def test_what_is_not_finite_reaches_the_rows_and_columns_that_have_it(format):
  for bad in (np.nan, np.inf, -np.inf):
    x, w, _ = operands()
    x[3, 40] = bad
    out = compiled(of(format))(x, w)
    np.testing.assert_array_equal(np.isfinite(out).all(1), np.arange(32) != 3)


@FORMATS
def test_tangents_are_products_of_blocks(format):
  x, w, _ = operands()
  dx, dw = normal(*x.shape, seed=7), normal(*w.shape, seed=8)
  _, tangent = compiled(lambda *p: jax.jvp(of(format), p[:2], p[2:]))(x, w, dx, dw)
  term = lambda a, b: by_hand.products(a, b, a[:, :64], format)[0]
  close(tangent, term(dx, w) + term(x, dw), term(abs(dx), abs(w)) + term(abs(x), abs(dw)))
  second = lambda w: jnp.sum(jnp.sin(of(format)(x, w)))
  curvature = compiled(lambda w: jax.jvp(jax.grad(second), (w,), (dw,))[1])(w)
  assert np.isfinite(curvature).all()


# Dimensions


def test_any_dimension_numbers():
  x, w = normal(3, 64, 2, 16), normal(64, 5, 3, 32, seed=1)[..., :16]
  dims = (((1, 3), (0, 3)), ((0,), (2,)))
  for format in by_hand.SIZES:
    out = compiled(of(format, dimension_numbers=dims))(x, w)
    rows = by_hand.held(x.transpose(0, 2, 1, 3).reshape(3, 2, -1), format)
    columns = by_hand.held(w.transpose(2, 1, 0, 3).reshape(3, 5, -1), format)
    close(out, np.einsum("bik,bjk->bij", rows, columns), np.einsum("bik,bjk->bij", abs(rows), abs(columns)))


def test_without_dimension_numbers_the_last_dimension_meets_the_last_but_one():
  x, w = normal(2, 16, 32), normal(2, 32, 16, seed=1)
  batched = compiled(of("mxfp8"))(x, w)
  for i in range(2):
    np.testing.assert_allclose(batched[i], compiled(of("mxfp8"))(x[i], w[i]), rtol=1e-5)


def test_errors_say_what_is_wrong():
  x, w = normal(32, 64), normal(64, 32)
  for arguments, options, words in (
    ((x, w), {"format": "mxfp6"}, "'mxfp6': expected one of mxfp8, mxfp4, nvfp4"),
    ((x, w), {"format": "mxpf8"}, "did you mean 'mxfp8'"),
    ((x.astype(np.int32), w), {}, "lhs is int32.*jax.lax.scaled_dot"),
    ((x, w.astype(ml_dtypes.float8_e4m3fn)), {}, "rhs is float8_e4m3fn"),
    ((x, w), {"preferred_element_type": np.int32}, "preferred_element_type=int32"),
    ((x, w), {"preferred_element_type": ml_dtypes.float8_e4m3fn}, "preferred_element_type=float8_e4m3fn"),
    ((x[0], w), {}, r"\(64,\).*pass dimension_numbers"),
    ((x[:, :48], w[:48]), {}, "contracts 48 elements, expected a multiple of 32"),
    ((x[:, :40], w[:40]), {"format": "nvfp4"}, "contracts 40 elements, expected a multiple of 16"),
  ):
    with pytest.raises(ValueError, match=words):
      mpjax.scaled_dot(*arguments, **options)
  with pytest.raises(ValueError, match="contracts 20 elements"):  # backward contracts the rows of x
    jax.eval_shape(jax.grad(lambda w: mpjax.scaled_dot(x[:20], w).sum()), w)


# Transforms


SIZES = np.float32([1, 3e-6, 40])[:, None, None]


@FORMATS
@pytest.mark.parametrize("axes", [(0, None), (None, 2), (1, 0)], ids=str)
def test_vmap_is_a_loop_of_members_with_scales_of_their_own(format, axes):
  """Values and gradients, of members whose magnitudes are far apart; a shared operand has a gradient for each."""
  shapes, whole = ((32, 64), (64, 96)), []
  for i, (axis, shape) in enumerate(zip(axes, shapes, strict=True)):
    stacked = normal(3, *shape, seed=i) * SIZES
    whole.append(normal(*shape, seed=i) if axis is None else np.moveaxis(stacked, 0, axis))
  ct = normal(3, 32, 96, seed=9) / SIZES
  own = lambda x, w, ct: (of(format)(x, w), *jax.vjp(of(format), x, w)[1](ct))
  one, mapped = compiled(own), compiled(jax.vmap(own, (*axes, 0)))(*whole, ct)
  take = lambda x, axis, i: x if axis is None else np.take(x, i, axis)
  for i in range(3):
    alone = one(*(take(x, axis, i) for x, axis in zip(whole, axes, strict=True)), ct[i])
    for got, want in zip(mapped, alone, strict=True):
      np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
  outside = compiled(jax.vmap(of(format), axes))(*whole)
  np.testing.assert_allclose(outside, mapped[0], rtol=1e-5, atol=1e-9)


@FORMATS
def test_jit_scan_and_checkpoint_change_nothing(format):
  x, ws = normal(32, 32), normal(3, 32, 32, seed=1, scale=0.2)
  layer = lambda x, w: jnp.tanh(mpjax.scaled_dot(x, w, format=format))
  scanned = lambda body: lambda x, ws: jax.lax.scan(lambda c, w: (body(c, w), None), x, ws)[0]
  programs = {
    "scan": scanned(layer),
    "checkpoint": scanned(jax.checkpoint(layer)),
    "dots": scanned(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)),
    "jit": lambda x, ws: functools.reduce(jax.jit(layer), ws, x),
  }
  gradients = lambda fun: jax.value_and_grad(lambda *a: jnp.sum(jnp.square(fun(*a))), (0, 1))(x, ws)
  loop = lambda x, ws: functools.reduce(layer, ws, x)
  want, found = compiled(
    lambda: (gradients(loop), {name: gradients(fun) for name, fun in programs.items()})
  )()
  for name, results in found.items():
    for got, reference in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
      assert relative(got, reference) < 0.02, name  # sums in another order may round a code the other way


# Meshes


SPECS = {
  "rows": (P("d"), P(), P("d")),
  "columns": (P(), P(None, "d"), P(None, "d")),
  "contracted": (P(None, "d"), P("d"), P()),
  "two axes": (P("d", "e"), P("e"), P("d")),
}


def on_mesh(over, kind):
  shape, names = ((4, 2), ("d", "e")) if over == "two axes" else ((8,), ("d",))
  mesh = jax.make_mesh(shape, names, axis_types=(getattr(jax.sharding.AxisType, kind),) * len(names))
  whole = normal(128, 256), normal(256, 128, seed=1), normal(128, 128, seed=2)
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  return mesh, whole, [put(x, spec) for x, spec in zip(whole, SPECS[over], strict=True)]


@FORMATS
@pytest.mark.parametrize("over", SPECS)
def test_eight_devices_have_the_values_of_one(format, over):
  mesh, whole, divided = on_mesh(over, "Auto")
  run = with_gradients(of(format))
  with jax.set_mesh(mesh):
    results = run(*divided)
  for got, want in zip(results, run(*whole), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@FORMATS
@pytest.mark.parametrize("over", ["rows", "columns"])
def test_explicit_axes_give_the_types_and_values_of_a_plain_product(format, over):
  mesh, whole, divided = on_mesh(over, "Explicit")
  run = with_gradients(of(format))
  with jax.set_mesh(mesh):
    kinds = lambda fun: [a.sharding for a in jax.tree.leaves(jax.eval_shape(fun, *divided))]
    assert kinds(run) == kinds(with_gradients(jnp.matmul))
    results = run(*divided)
  for got, want in zip(results, run(*whole), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


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
