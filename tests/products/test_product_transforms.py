"""The FP8 product under vmap, jit, scan, remat and shardings; what is lowered, and what is kept for backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  AMD,
  E4M3,
  GRADIENT_ERROR,
  SAVED,
  Product,
  bits,
  compiled,
  lowered,
  matmul,
  normal,
  relative,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

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
