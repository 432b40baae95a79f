"""The FP8 product: derivatives of rounded operands in float64, transforms, shardings, what is lowered and kept."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  AMD,
  E4M3,
  E4M3_AMD,
  E5M2,
  E5M2_AMD,
  GRADIENT_ERROR,
  SAVED,
  Product,
  bits,
  check_product,
  compiled,
  flushed,
  lowered,
  matmul,
  normal,
  relative,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

RECIPES = {
  "current": "current",
  "mx": "mx",
  "saved": SAVED,
  "amd": AMD,
  "margin": {"margin": 3},
  "delayed": "delayed",
}
GIVEN = (2.0**-9, float(np.float32(0.37)), 300.0)  # what a product is given under `delayed`


def options_of(name):
  return {"recipe": RECIPES[name], "scales": tuple(map(np.float32, GIVEN)) if name == "delayed" else None}


@functools.cache
def with_gradients_of(name):
  return with_gradients(functools.partial(matmul, **options_of(name)))


# Dimensions of every kind, in any order, dimensions of one, and several contracted ones.
CASES = [
  Product("ik", "kj", "", "k", {"i": 4, "k": 6, "j": 5}),
  Product("bik", "kjb", "b", "k", {"b": 2, "i": 4, "k": 6, "j": 1}),
  Product("kilm", "lckb", "", "lk", {"k": 3, "i": 2, "l": 4, "m": 5, "c": 1, "b": 2}),
  Product("ab", "ba", "ab", "", {"a": 3, "b": 4}),
]


@pytest.mark.parametrize("name", ["current", "margin", "amd", "saved", "delayed"])
def test_derivatives_of_any_dimensions_are_products_of_rounded_operands(name):
  forward, gradient = (E4M3_AMD, E5M2_AMD) if name == "amd" else (E4M3, E5M2)
  margin = 3 if name == "margin" else 0
  x, w, g = GIVEN if name == "delayed" else (None,) * 3
  for case in CASES:
    lhs, rhs, ct, d_lhs = (
      normal(*case.shape(letters), seed=i, scale=10.0 ** (3 * i))
      for i, letters in enumerate((case.lhs, case.rhs, case.out, case.lhs))
    )

    @compiled
    def run(lhs, rhs, ct, d_lhs, case=case):
      fun = lambda lhs, rhs: fp8_dot_general(lhs, rhs, case.dims, **options_of(name))
      out, back = jax.vjp(fun, lhs, rhs)
      return out, *back(ct), jax.jvp(lambda lhs: fun(lhs, rhs), (lhs,), (d_lhs,))[1]

    out, of_lhs, of_rhs, tangent = run(lhs, rhs, ct, d_lhs)
    of = lambda a, b, c: f"{a},{b}->{c}"
    check_product(out, of(case.lhs, case.rhs, case.out), lhs, rhs, forward, forward, (x, w), margin)
    check_product(of_lhs, of(case.out, case.rhs, case.lhs), ct, rhs, gradient, forward, (g, w), margin)
    check_product(of_rhs, of(case.lhs, case.out, case.rhs), lhs, ct, forward, gradient, (x, g), margin)
    if name != "saved":  # whose rhs is rounded once more
      spec = of(case.lhs, case.rhs, case.out)
      check_product(tangent, spec, d_lhs, rhs, gradient, forward, (None, w), margin)


def test_no_magnitudes_make_nan_of_finite_operands():
  left, right = normal(6, 16), normal(16, 5, seed=1)
  left[2] = 0
  right[:, 3] = 0
  # What is large never meets what is large.
  left[:, 8:] = 0
  right[8:] *= np.float32(1e4)
  exponents = (-38, -30, -20, 0, 20, 30, 38)
  sized = lambda x, exponent: flushed(np.clip(x.astype(np.float64) * 10.0**exponent, -3e38, 3e38))
  for row in itertools.product(exponents, repeat=2):
    lhs, rhs = map(sized, (left, right), row)
    out, *grads = with_gradients_of("current")(lhs, rhs, np.ones((6, 5), np.float32))
    check_product(out, "ij,jk->ik", lhs, rhs, E4M3, E4M3)
    assert not np.asarray(out)[2].any(), row
    assert not np.asarray(out)[:, 3].any(), row
    assert not any(np.isnan(g).any() for g in grads), row


def test_dtypes_of_results_and_gradients():
  w, ct = normal(16, 4), np.ones((8, 4), np.float32)
  for in_dtype in (np.float32, jnp.bfloat16, np.float16):
    for out_dtype in (None, "float32" if in_dtype == jnp.bfloat16 else "bfloat16"):
      x = normal(8, 16).astype(in_dtype)
      out, d_x, d_w = with_gradients(lambda x, w, dtype=out_dtype: matmul(x, w, out_dtype=dtype))(x, w, ct)
      assert out.dtype == (out_dtype or in_dtype)
      assert (d_x.dtype, d_w.dtype) == (in_dtype, "float32")
      check_product(out, "ij,jk->ik", x.astype(np.float32), w, E4M3, E4M3)


def test_sums_are_of_float32():
  # bfloat16 would stop at 256, float16 at 2048 with ones.
  out = matmul(np.ones((1, 20_000), np.float32), np.ones((20_000, 1), np.float32))
  assert float(out[0, 0]) == 20_000


def test_products_of_nothing():
  for name in ("current", "mx", "saved"):
    for x, w in (((0, 32), (32, 32)), ((32, 0), (0, 32)), ((32, 32), (32, 0))):
      out, *grads = with_gradients_of(name)(*(np.ones(s, np.float32) for s in (x, w, (x[0], w[1]))))
      assert not np.asarray(out).any(), (name, x, w)
      assert [g.shape for g in grads] == [x, w]


# Zeros, infinities, not numbers: of (lhs, rhs, gradient) and what comes of them, (result, gradients of lhs and rhs)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_give_zeros_and_what_is_not_finite_reaches_every_result_that_depends_on_it(name):
  square = [normal(32, 32, seed=i) for i in range(3)]
  for zero in ((0,), (1,), (2,), (0, 1, 2)):
    results = with_gradients_of(name)(*(x * (i not in zero) for i, x in enumerate(square)))
    for result, factors in zip(results, ((0, 1), (2, 1), (0, 2)), strict=True):
      assert np.isfinite(result).all()
      assert np.asarray(result).any() == (not set(factors) & set(zero)), (zero, factors)
  row, column = np.arange(32)[:, None], np.arange(32)
  reached = (row == 3, False, row == 5), (column == 5, column == 3, False), (False, row == 3, column == 5)
  for dtype in (np.float32, jnp.bfloat16, np.float16) if name == "current" else (np.float32,):
    for bad, where in itertools.product((np.inf, -np.inf, np.nan), range(3)):
      operands = [x.astype(dtype) for x in square]
      operands[where][3, 5] = bad
      for got, expected in zip(with_gradients_of(name)(*operands), reached[where], strict=True):
        found = ~np.isfinite(np.asarray(got, np.float32))
        np.testing.assert_array_equal(found, np.broadcast_to(expected, (32, 32)), err_msg=f"{bad} {where}")


# Derivatives


def test_hessian_beside_that_of_float32():
  x, w = normal(12, 16), normal(16, 8, seed=1, scale=0.2)
  loss = lambda dot: lambda w: jnp.mean(jnp.tanh(dot(x, w)))
  ours = loss(matmul)
  run = compiled(
    lambda w: (jax.hessian(loss(jnp.matmul))(w), jax.hessian(ours)(w), jax.jacrev(jax.jacrev(ours))(w))
  )
  want, *hessians = run(w)
  assert max(relative(hessian, want) for hessian in hessians) < 0.15


# vmap


BATCHED = Product("bik", "kjb", "b", "k", {"b": 2, "i": 4, "k": 6, "j": 5})
PLAIN = Product("ki", "jk", "", "k", {"i": 4, "k": 6, "j": 5})
TWO = Product("kil", "lkj", "", "lk", {"i": 4, "k": 3, "l": 2, "j": 5})
DELAYED = {"recipe": "delayed", **SAVED}
MEMBERS = np.float32([1, 3e-6, 40])  # how large the members of an ensemble are
BLOCKS = Product("ik", "kj", "", "k", {"i": 32, "k": 64, "j": 96})
# The product, its recipe or the format of `scaled_dot`, and the axes of the members of lhs, rhs and given scales.
ENSEMBLES = [
  (PLAIN, "current", (0, None)),
  (BATCHED, {"recipe": "current", "margin": 3}, (None, -1)),
  (TWO, SAVED, (1, 0)),
  (BLOCKS, "mxfp8", (0, None)),
  (BLOCKS, "mxfp4", (1, 0)),
  (BLOCKS, "nvfp4", (None, 2)),
  (BATCHED, DELAYED, (0, None, None, None, None)),
  (BATCHED, "delayed", (None, 0, None, 0, None)),
  (TWO, DELAYED, (2, 1, None, 0, None)),
]


@pytest.mark.parametrize(("case", "recipe", "axes"), ENSEMBLES)
def test_a_member_of_an_ensemble_has_its_own_scale(case, recipe, axes):
  """vmap of a product and its gradients, and the gradients of vmap, are those of the members by themselves."""

  def members(letters, axis, seed):
    each = [size * normal(*case.shape(letters), seed=seed + i) for i, size in enumerate(MEMBERS)]
    return normal(*case.shape(letters), seed=seed) if axis is None else np.stack(each, axis)

  x, w, ct = members(case.lhs, axes[0], 0), members(case.rhs, axes[1], 5), members(case.out, 0, 10)
  scales = [np.float32(4) if axis is None else np.float32([2, 1e5, 0.25]) for axis in axes[2:]]

  def fun(x, w, *scales):
    if case is BLOCKS:
      return mpjax.scaled_dot(x, w, format=recipe)
    return fp8_dot_general(x, w, case.dims, recipe, scales=scales or None)

  def with_cotangent(fun):
    def run(ct, x, w, *scales):
      out, back = jax.vjp(lambda x, w: fun(x, w, *scales), x, w)
      return out, *back(ct)

    return run

  inside = jax.vmap(with_cotangent(fun), (0, *axes))
  outside = with_cotangent(jax.vmap(fun, axes))
  take = lambda x, axis, i: x if axis is None else np.take(x, i, axis)
  of_member = lambda i: [take(a, axis, i) for a, axis in zip((ct, x, w, *scales), (0, *axes), strict=True)]
  alone = [compiled(with_cotangent(fun))(*of_member(i)) for i in range(3)]
  run = compiled(lambda *args: (inside(*args), outside(*args)))
  inner, outer = jax.tree.map(np.asarray, run(ct, x, w, *scales))
  for place, axis in enumerate((0, *axes[:2])):
    wanted = [results[place] for results in alone]
    if axis is None:  # the sum over members, each of which has lost what is small beside the largest
      bound = {"nvfp4": 0.2, "mxfp4": 0.2}.get(str(recipe), 0.01)
      assert relative(outer[place], sum(map(np.float64, wanted))) < bound
    for i, want in enumerate(wanted):
      each = [inner[place][i]] + ([np.take(outer[place], i, axis)] if axis is not None else [])
      for got in each:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_members_that_share_an_operand_each_count_in_its_gradient():
  """One has small activations and a large gradient, the other is the other way round."""
  sizes = np.float32([1e-6, 1])
  x, w = normal(2, 64, 32) * sizes[:, None, None], normal(32, 16, seed=1)
  ct = normal(2, 64, 16, seed=2) / sizes[:, None, None]
  for recipe in ("current", SAVED):
    fun = jax.vmap(lambda x, w, r=recipe: matmul(x, w, r), (0, None))
    d_w = compiled(lambda w, fun=fun: jax.vjp(lambda w: fun(x, w), w)[1](ct)[0])(w)
    assert relative(d_w, np.einsum("vij,vik->jk", x, ct)) < GRADIENT_ERROR


# Transforms


def test_scales_may_be_given_as_any_numbers():
  x, w = normal(8, 16), normal(16, 4)
  want = matmul(jnp.asarray(x), jnp.asarray(w), "delayed", scales=(jnp.float32(2),) * 3)
  for scales in [(2.0,) * 3, [2.0, 2.0, 2.0], np.full(3, 2, np.float32)]:
    np.testing.assert_array_equal(matmul(x, w, "delayed", scales=scales), want)


P = jax.sharding.PartitionSpec
# What devices divide: specs of the operands and of the result.
SPECS = {
  "rows": (P("d"), P(), P("d")),
  "columns": (P(), P(None, "d"), P(None, "d")),
  "contracted": (P(None, "d"), P("d"), P()),
  "two axes": (P("d", "e"), P("e"), P("d")),
  "none": (P(), P(), P()),
}
ON_MESHES = {
  "current": matmul,
  "saved": functools.partial(matmul, recipe=SAVED),
  "mx": functools.partial(matmul, recipe="mx"),
  "nvfp4": functools.partial(matmul, recipe="nvfp4"),
  "scaled_dot": functools.partial(mpjax.scaled_dot, format="nvfp4"),
}


def on_mesh(over, kind):
  """A mesh with axes of a kind, and x, w and a cotangent, whole and divided."""
  shape, names = ((4, 2), ("d", "e")) if over == "two axes" else ((8,), ("d",))
  mesh = jax.make_mesh(shape, names, axis_types=(getattr(jax.sharding.AxisType, kind),) * len(names))
  whole = normal(128, 256), normal(256, 128, seed=1), normal(128, 128, seed=2)
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  return mesh, whole, [put(x, spec) for x, spec in zip(whole, SPECS[over], strict=True)]


@pytest.mark.parametrize(
  ("over", "kind"),
  [*((over, "Auto") for over in [*SPECS][:-1]), *((over, "Explicit") for over in [*SPECS][:2])],
)
def test_divided_operands_have_the_values_and_types_of_whole_ones(over, kind):
  mesh, whole, divided = on_mesh(over, kind)
  for name, fun in ON_MESHES.items():
    run = with_gradients(fun)
    with jax.set_mesh(mesh):
      results = run(*divided)
      if kind == "Explicit":
        kinds = lambda fun: [a.sharding for a in jax.tree.leaves(jax.eval_shape(fun, *divided))]
        assert kinds(run) == kinds(with_gradients(jnp.matmul)), name
    for got, want in zip(results, run(*whole), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)


# What is lowered


def dots(fun, *args, platform):
  return [operands for *operands, _ in lowered(fun, *args, platform=platform)]


def test_operands_of_the_lowered_products():
  e4m3, e5m2 = "f8E4M3FN", "f8E5M2"
  args = normal(16, 32), normal(32, 48)
  for recipe in ("current", SAVED, "delayed"):
    scales = (np.float32(1),) * 3 if recipe == "delayed" else None
    loss = lambda x, w, recipe=recipe, scales=scales: jnp.sum(jnp.sin(matmul(x, w, recipe, scales=scales)))
    for platform in ("cuda", "rocm", "tpu"):
      got = sorted(dots(jax.grad(loss, (0, 1)), *args, platform=platform))
      assert got == sorted([[e4m3, e4m3], [e4m3, e5m2], [e5m2, e4m3]]), (recipe, platform)
    assert dots(jax.grad(loss, (0, 1)), *args, platform="cpu") == [["f32", "f32"]] * 3, recipe
  assert dots(lambda x, w: matmul(x, w, AMD), *args, platform="rocm") == [["f8E4M3FNUZ"] * 2]


def test_native_overrides_the_platform():
  x, w = normal(16, 32), normal(32, 48)
  assert dots(lambda x, w: matmul(x, w, native=False), x, w, platform="cuda") == [["bf16"] * 2]
  assert dots(lambda x, w: matmul(x, w, native=True), x, w, platform="cpu") == [["f8E4M3FN"] * 2]
  np.testing.assert_allclose(matmul(x, w, native=True), matmul(x, w, native=False), rtol=1e-5, atol=1e-5)


# What is kept for the backward pass


def residuals(fun, *args):
  leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
  return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.ndim)


def test_what_is_kept_is_fp8_where_asked_for():
  x, w, ws = normal(16, 32), normal(32, 48), normal(3, 32, 32, seed=1)
  given = (np.float32(2),) * 3
  for recipe, scales, dtype in (("current", None, "float32"), (SAVED, None, E4M3), (DELAYED, given, E4M3)):
    kept = residuals(lambda x, w, r=recipe, s=scales: matmul(x, w, r, scales=s), x, w)
    assert kept == [((16, 32), dtype), ((32, 48), dtype)], recipe
  scanned = lambda x, ws: jax.lax.scan(lambda x, w: (matmul(x, w, SAVED), None), x, ws)[0]
  kept = [dtype for shape, dtype in residuals(scanned, x, ws) if len(shape) > 2]
  assert set(kept) == {E4M3}


@pytest.mark.parametrize("how", ["jit", "remat", "vmap"])
def test_saved_fp8_gives_the_same_gradients_to_the_bit(how):
  x, w, ct = normal(16, 32), normal(32, 48, seed=1), normal(16, 48, seed=2)
  scales = None if how == "remat" else tuple(map(jnp.float32, (2, 3, 4)))
  if how == "vmap":
    x, ct = np.stack([x, 3 * x]), np.stack([ct, ct])

  def run(recipe):
    fun = lambda x, w: matmul(x, w, recipe, scales=scales)
    return with_gradients({"remat": jax.checkpoint(fun), "vmap": jax.vmap(fun, (0, None))}.get(how, fun))

  for got, want in zip(run(SAVED)(x, w, ct), run("current")(x, w, ct), strict=True):
    np.testing.assert_array_equal(bits(got), bits(want))


def test_saved_fp8_refuses_a_second_derivative_and_says_what_to_write():
  x, w = normal(16, 32), normal(32, 16)
  loss = lambda w: jnp.sum(jnp.sin(matmul(x, w, SAVED)))
  for second in (jax.hessian(loss), lambda w: jax.jvp(jax.grad(loss), (w,), (w,))):
    with pytest.raises(NotImplementedError, match="saved_activations: compute"):
      jax.eval_shape(second, w)
  # A second derivative in something else is no business of the product's.
  other = jax.grad(lambda b: jnp.sum(jax.grad(lambda w: jnp.sum(b**3 * matmul(x, w, SAVED)))(w)))
  assert np.isfinite(compiled(other)(1.0))


# Errors


SQUARE, ONE = (normal(4, 8), normal(8, 4)), np.float32(1)
WRONG = [
  ((*SQUARE, "mx"), (ONE,) * 3, "a scale for each block"),
  ((*SQUARE, "current"), (ONE,) * 2, "expected three"),
  ((*SQUARE, "current"), (np.ones(3, np.float32),) * 3, "expected three"),
  ((*SQUARE, "delayed"), None, "scales"),
  ((*SQUARE, "curent"), None, "auto, current, delayed, per_channel, mx, nvfp4"),
  ((SQUARE[0].astype(np.int32), SQUARE[1]), None, "int32"),
  ((SQUARE[0], SQUARE[1].astype(np.complex64)), None, "complex64"),
  ((np.ones((32, 33)), np.ones((33, 32)), "mx"), None, "contracts 33 elements, expected a multiple of 32"),
  ((np.ones((16, 32)), np.ones((32, 40)), "nvfp4"), None, "40 rows, expected a multiple of 16"),
]


@pytest.mark.parametrize(("arguments", "scales", "message"), WRONG)
def test_errors_say_what_is_wrong(arguments, scales, message):
  with pytest.raises(ValueError, match=message):
    matmul(*arguments, scales=scales)
