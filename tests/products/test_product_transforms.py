"""The FP8 product under vmap, jit, scan, remat and shardings; what is lowered, and what is kept for backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  AMD,
  E4M3,
  E5M2,
  FORWARD_ERROR,
  GRADIENT_ERROR,
  SAVED,
  Product,
  bits,
  compiled,
  held,
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
DELAYED = ("delayed", {"recipe": "delayed", **SAVED})


def by_hand(case, recipe, ct):
  """The product and both gradients with given scales, in NumPy, as one stacked vector."""

  def run(lhs, rhs, *scales):
    x, w = held(lhs, scales[0], E4M3), held(rhs, scales[1], E4M3)
    g = held(ct, scales[2], E5M2)
    specs = [
      (f"{case.lhs},{case.rhs}->{case.out}", x, w),
      (f"{case.out},{case.rhs}->{case.lhs}", g, w),
      (f"{case.lhs},{case.out}->{case.rhs}", x, g),
    ]
    return [np.einsum(*spec) for spec in specs]

  return run


def looped(fun, axes):
  """The loop that `vmap` stands for."""

  def run(*arguments):
    take = lambda x, axis, i: x if axis is None else np.take(x, i, axis=axis)
    outs = [fun(*(take(x, axis, i) for x, axis in zip(arguments, axes, strict=True))) for i in range(3)]
    return [np.stack(xs) for xs in zip(*outs, strict=True)]

  return run


def check_vmap(case, recipe, *levels):
  """Compares vmap of the product and its gradients with the loop; `levels` of axes from the outermost."""
  arguments = []
  for i, base in enumerate((case.shape(case.lhs), case.shape(case.rhs), (), (), ())):
    shape = list(base)
    for axes in reversed(levels):
      if axes[i] is not None:
        shape.insert(len(shape) + 1 + axes[i] if axes[i] < 0 else axes[i], 3)
    x = normal(*shape, seed=i)
    arguments.append(np.asarray(x if i < 2 else 2 + np.abs(x), np.float32))
  ct = normal(*case.shape(case.out), seed=9)

  def mapped(lhs, rhs, *scales):
    out, back = jax.vjp(lambda x, w: fp8_dot_general(x, w, case.dims, recipe, scales=scales), lhs, rhs)
    return out, *back(ct)

  loop = by_hand(case, recipe, ct)
  for axes in reversed(levels):
    mapped, loop = jax.vmap(mapped, axes), looped(loop, axes)
  for got, want in zip(compiled(mapped)(*arguments), loop(*arguments), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Axes of the operands and of the three scales, of which every pair is some case's.
MAPPED = [
  (None, None, 0, 0, 0),
  (0, None, None, None, None),
  (1, None, 0, None, None),
  (-1, None, None, None, 0),
  (None, 0, None, 0, None),
  (None, -1, 0, 0, 0),
  (0, 0, None, None, None),
  (2, 1, None, 0, None),
  (1, 0, None, None, 0),
]


@pytest.mark.parametrize("number", range(len(MAPPED)), ids=lambda i: str(MAPPED[i]))
def test_vmap_is_a_loop(number):
  check_vmap((PLAIN, BATCHED, TWO)[number % 3], DELAYED[number % 2], MAPPED[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MAPPED)), ids=lambda i: str(MAPPED[i]))
def test_vmap_of_other_products_and_scales_is_a_loop(number):
  operands, scales = MAPPED[number][:2], MAPPED[(number + 4) % len(MAPPED)][2:]
  check_vmap((PLAIN, BATCHED, TWO)[(number + 1) % 3], DELAYED[(number + 1) % 2], (*operands, *scales))


def test_vmap_of_vmap_is_a_loop_of_loops():
  for number, levels in enumerate(
    [
      [(0, None, 0, None, None), (0, 0, None, None, None)],
      [(None, 0, None, 0, None), (0, None, 0, None, None)],
      [(1, None, None, None, 0), (None, 1, 0, None, None)],
      [(0, 0, 0, 0, 0), (1, 1, 0, 0, 0)],
    ]
  ):
    check_vmap(BATCHED, DELAYED[number % 2], *levels)


MEMBERS = np.float32([1, 3e-6, 40])  # how large the members of an ensemble are


def members(case, letters, axis, seed):
  """An operand of members of such sizes along an axis; `None`: one for all of them."""
  if axis is None:
    return normal(*case.shape(letters), seed=seed)
  each = [size * normal(*case.shape(letters), seed=seed + i) for i, size in enumerate(MEMBERS)]
  return np.stack(each, axis)


CASES = [PLAIN, BATCHED, TWO]
RECIPES = ["current", {"recipe": "current", "margin": 3}, SAVED]
AXES = [(0, None), (None, -1), (1, 0)]


@pytest.mark.parametrize("number", range(3))
def test_a_member_of_an_ensemble_has_its_own_scale(number):
  check_ensemble(CASES[number], RECIPES[number], AXES[number])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["plain", "batched", "two"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_member_of_any_ensemble_has_its_own_scale(case, recipe):
  for axes in AXES:
    check_ensemble(case, recipe, axes)


def check_ensemble(case, recipe, axes):
  """Compares vmap of a product and its gradients, and the gradients of vmap, with the members by themselves."""
  pairs = zip((case.lhs, case.rhs), axes, strict=True)
  x, w = (members(case, letters, axis, 5 * i) for i, (letters, axis) in enumerate(pairs))
  ct = members(case, case.out, 0, 10)
  fun = lambda x, w: fp8_dot_general(x, w, case.dims, recipe)

  def with_cotangent(fun):
    def run(x, w, ct):
      out, back = jax.vjp(fun, x, w)
      return out, *back(ct)

    return run

  inside = jax.vmap(with_cotangent(fun), (*axes, 0))
  outside = with_cotangent(jax.vmap(fun, axes))
  one = compiled(with_cotangent(fun))
  take = lambda x, axis, i: x if axis is None else np.take(x, i, axis)
  alone = [one(take(x, axes[0], i), take(w, axes[1], i), ct[i]) for i in range(3)]
  wanted = [np.stack(xs) for xs in zip(*alone, strict=True)]
  got = compiled(lambda *args: (inside(*args), outside(*args)))(x, w, ct)
  for ours, want in zip(got[0], wanted, strict=True):
    np.testing.assert_allclose(ours, want, rtol=1e-5)
  for ours, want, axis in zip(got[1], wanted, (0, *axes), strict=True):
    if axis is None:  # the sum over members, each of which has lost what is small beside the largest
      assert relative(ours, want.sum(0)) < 0.01
    else:
      np.testing.assert_allclose(np.moveaxis(ours, axis, 0), want, rtol=1e-5)


def test_members_that_share_an_operand_each_count_in_its_gradient():
  """One has small activations and a large gradient, the other is the other way round."""
  sizes = np.float32([1e-6, 1])
  x, w = normal(2, 64, 32) * sizes[:, None, None], normal(32, 16, seed=1)
  ct = normal(2, 64, 16, seed=2) / sizes[:, None, None]
  for recipe in ("current", SAVED):
    fun = jax.vmap(lambda x, w, r=recipe: matmul(x, w, r), (0, None))
    d_w = compiled(lambda w, fun=fun: jax.vjp(lambda w: fun(x, w), w)[1](ct)[0])(w)
    assert relative(d_w, np.einsum("vij,vik->jk", x, ct)) < GRADIENT_ERROR


def test_members_of_members():
  """Operands of two ensembles, each pair of which is a member: the gradient of one is a sum over the other."""
  sizes = np.float32([1, 1e-5])[:, None, None]
  x, w, ct = normal(2, 8, 16) * sizes, normal(2, 16, 4, seed=1) / sizes, normal(2, 2, 8, 4, seed=2)
  pairs = jax.vmap(jax.vmap(matmul, (None, 0)), (0, None))
  out, d_x, d_w = with_gradients(pairs)(x, w, ct)
  for i in range(2):
    for j in range(2):
      np.testing.assert_allclose(out[i, j], compiled(matmul)(x[i], w[j]), rtol=1e-5)
    assert relative(d_x[i], np.einsum("vik,vjk->ij", ct[i], w)) < GRADIENT_ERROR
    assert relative(d_w[i], np.einsum("vij,vik->jk", x, ct[:, i])) < GRADIENT_ERROR


def test_second_derivatives_of_members():
  x, w = normal(3, 8, 16) * MEMBERS[:, None, None], normal(16, 4, seed=1)
  loss = lambda x, w: jnp.sum(jnp.sin(matmul(x, w)))
  of_all = lambda x, w: jax.vmap(loss, (0, None))(x, w).sum()
  second = lambda f: lambda x, w: jax.grad(lambda x: jnp.sum(jax.grad(f)(x, w) ** 2))(x)
  got = compiled(second(of_all))(x, w)
  one = compiled(second(loss))
  for i in range(3):
    np.testing.assert_allclose(got[i], one(x[i], w), rtol=1e-4, atol=1e-30)


def test_jacobians_by_vmap():
  x, w = normal(3, 16), normal(16, 4, seed=1)
  want = jax.jacrev(lambda w: x @ w)(w)
  of = lambda w: matmul(x, w)
  for jacobian in compiled(lambda w: (jax.jacfwd(of)(w), jax.jacrev(of)(w)))(w):
    assert relative(jacobian, want) < GRADIENT_ERROR


# Transforms


@pytest.mark.parametrize("recipe", ["current", "mx", SAVED], ids=str)
def test_scan_remat_and_cond_change_nothing(recipe):
  x, ws = normal(32, 32), normal(3, 32, 32, seed=1, scale=0.2)
  layer = lambda x, w: jnp.tanh(matmul(x, w, recipe))

  def loop(x, ws):
    for w in ws:
      x = layer(x, w)
    return jnp.sum(jnp.square(x))

  scanned = lambda body: (
    lambda x, ws: jnp.sum(jnp.square(jax.lax.scan(lambda c, w: (body(c, w), None), x, ws)[0]))
  )
  programs = {
    "scan": scanned(layer),
    "scan of remat": scanned(jax.checkpoint(layer)),
    "cond": lambda x, ws: jax.lax.cond(x[0, 0] < 1e9, jax.jit(loop), lambda *_: 0.0, x, ws),
  }
  gradients = lambda fun: jax.value_and_grad(fun, (0, 1))(x, ws)
  want, results = compiled(
    lambda: (gradients(loop), {name: gradients(fun) for name, fun in programs.items()})
  )()
  for name, result in results.items():
    for got, reference in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(got, reference, rtol=2e-2, atol=2e-2 * np.abs(reference).max(), err_msg=name)


def test_numpy_arguments_and_traced_scales():
  x, w = normal(8, 16), normal(16, 4)
  want = matmul(jnp.asarray(x), jnp.asarray(w), "delayed", scales=(jnp.float32(2),) * 3)
  for scales in [(2.0,) * 3, (np.float32(2),) * 3, [2.0, 2.0, 2.0], np.full(3, 2, np.float32)]:
    np.testing.assert_array_equal(matmul(x, w, "delayed", scales=scales), want)
  for recipe in DELAYED:
    got, back = jax.vjp(lambda x, recipe=recipe: matmul(x, w, recipe, scales=scales), x)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(back(got)[0]).all()


P = jax.sharding.PartitionSpec
X, W_, CT = (normal(64, 64, seed=i) for i in range(3))


def mesh_of_two(kind):
  return jax.make_mesh((2,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))


# What two devices divide: specs of the operands and of the result.
SPECS = {
  "lhs": (P("d"), P(), P("d")),
  "rhs": (P(), P(None, "d"), P(None, "d")),
  "contracted": (P(None, "d"), P("d"), P()),
  "none": (P(), P(), P()),
}


@pytest.mark.parametrize(
  ("recipe", "over"),
  [*(("current", over) for over in SPECS), (SAVED, "contracted"), ("mx", "rhs")],
  ids=str,
)
def test_a_product_over_two_devices(over, recipe):
  *in_specs, out_spec = SPECS[over]
  mesh = mesh_of_two("Auto")

  def local(x, w):
    out = matmul(x, w, recipe)
    return jax.lax.psum(out, "d") if over == "contracted" else out

  fun = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_spec)
  out, d_x, d_w = with_gradients(fun)(X, W_, CT)
  assert relative(out, X @ W_) < FORWARD_ERROR
  assert relative(d_x, CT @ W_.T) < GRADIENT_ERROR
  assert relative(d_w, X.T @ CT) < GRADIENT_ERROR
  if over == "none":
    return
  # Arrays that are divided, under jit.
  run = with_gradients(lambda x, w: matmul(x, w, recipe))
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  divided = run(*(put(x, spec) for x, spec in zip((X, W_, CT), SPECS[over], strict=True)))
  for got, want in zip(divided, run(X, W_, CT), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_explicit_sharding_gives_what_a_plain_product_gives():
  with jax.set_mesh(mesh_of_two("Explicit")):
    arrays = [jax.device_put(x, spec) for x, spec in zip((X, W_, CT), SPECS["lhs"], strict=True)]
    kinds = lambda fun: [a.sharding for a in jax.tree.leaves(jax.eval_shape(with_gradients(fun), *arrays))]
    assert [sharding.spec[0] for sharding in kinds(jnp.matmul)] == ["d", "d", None]
    for recipe in ("current", SAVED, "mx"):
      assert kinds(lambda x, w, recipe=recipe: matmul(x, w, recipe)) == kinds(jnp.matmul), recipe


# What is lowered


def dots(fun, *arguments, platform):
  """Operand types of the dot_generals of an exported program."""
  text = jax.export.export(jax.jit(fun), platforms=[platform])(*arguments).mlir_module()
  lines = [line.split(" : (")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]
  return [tuple(t.split("x")[-1].split(">")[0] for t in line.split(" -> ")[0].split(", ")) for line in lines]


def test_operands_of_the_lowered_products():
  e4m3, e5m2 = "f8E4M3FN", "f8E5M2"
  for recipe in ("current", SAVED, "delayed"):
    scales = (np.float32(1),) * 3 if recipe == "delayed" else None
    loss = lambda x, w, recipe=recipe, scales=scales: jnp.sum(jnp.sin(matmul(x, w, recipe, scales=scales)))
    for platform in ("cuda", "rocm", "cpu", "tpu"):
      got = sorted(dots(jax.grad(loss, (0, 1)), normal(16, 32), normal(32, 48), platform=platform))
      if platform != "cpu":
        assert got == sorted([(e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)]), (recipe, platform)
      else:
        assert len(got) == 3
        assert {dtype for pair in got for dtype in pair} == {"f32"}, (recipe, platform)


def test_native_formats_of_amd():
  got = dots(lambda x, w: matmul(x, w, AMD), normal(16, 32), normal(32, 48), platform="rocm")
  assert got == [("f8E4M3FNUZ", "f8E4M3FNUZ")]


def test_native_overrides_the_platform():
  x, w = normal(16, 32), normal(32, 48)
  assert dots(lambda x, w: matmul(x, w, native=False), x, w, platform="cuda") == [("bf16", "bf16")]
  assert dots(lambda x, w: matmul(x, w, native=True), x, w, platform="cpu") == [("f8E4M3FN", "f8E4M3FN")]
  np.testing.assert_allclose(matmul(x, w, native=True), matmul(x, w, native=False), rtol=1e-5, atol=1e-5)


def test_one_program_for_several_platforms():
  exported = jax.export.export(jax.jit(matmul), platforms=["cpu", "cuda"])(normal(16, 32), normal(32, 48))
  np.testing.assert_array_equal(
    exported.call(normal(16, 32), normal(32, 48)), matmul(normal(16, 32), normal(32, 48))
  )


def test_blocks_are_lowered_for_a_gpu():
  # The custom call of scaled_matmul cannot be serialised, so this stops before that.
  lowered = jax.jit(lambda x, w: matmul(x, w, "mx")).trace(normal(32, 64), normal(64, 32))
  text = lowered.lower(lowering_platforms=("cuda",)).as_text()
  assert "block_scaled_dot" in text or "f8E4M3FN" in text


# What is kept for the backward pass


def residuals(fun, *args):
  leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
  return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.ndim)


def test_what_is_kept_is_fp8_where_asked_for():
  x, w, ws = normal(16, 32), normal(32, 48), normal(3, 32, 32, seed=1)
  given = (np.float32(2),) * 3
  for recipe, scales, dtype in (("current", None, "float32"), (SAVED, None, E4M3), (DELAYED[1], given, E4M3)):
    kept = residuals(lambda x, w, r=recipe, s=scales: matmul(x, w, r, scales=s), x, w)
    assert kept == [((16, 32), dtype), ((32, 48), dtype)], recipe
  scanned = lambda x, ws: jax.lax.scan(lambda x, w: (matmul(x, w, SAVED), None), x, ws)[0]
  kept = [dtype for shape, dtype in residuals(scanned, x, ws) if len(shape) > 2]
  assert set(kept) == {E4M3}


@pytest.mark.parametrize(
  ("how", "dtype", "scales"),
  [
    ("eager", "float32", None),
    ("jit", "bfloat16", (2.0, 3.0, 4.0)),
    ("remat", "bfloat16", None),
    ("vmap", "float32", (2.0, 3.0, 4.0)),
  ],
)
def test_saved_fp8_gives_the_same_gradients_to_the_bit(scales, dtype, how):
  x, w, ct = (jnp.asarray(normal(*s, seed=i), dtype) for i, s in enumerate([(16, 32), (32, 48), (16, 48)]))
  if how == "vmap":
    x, ct = jnp.stack([x, 3 * x]), jnp.stack([ct, ct])
  scales = scales and tuple(map(jnp.float32, scales))

  def run(recipe):
    fun = lambda x, w: matmul(x, w, recipe, scales=scales)
    fun = {"remat": jax.checkpoint(fun), "vmap": jax.vmap(fun, (0, None))}.get(how, fun)

    def grads(x, w, ct):
      out, back = jax.vjp(fun, x, w)
      return out, *back(ct)

    return (grads if how == "eager" else compiled(grads))(x, w, ct)

  for got, want in zip(run(SAVED), run("current"), strict=True):
    np.testing.assert_array_equal(bits(got), bits(want))


def test_saved_fp8_refuses_a_second_derivative_and_says_what_to_write():
  x, w = normal(16, 32), normal(32, 16)
  loss = lambda w: jnp.sum(jnp.sin(matmul(x, w, SAVED)))
  for second in (
    jax.hessian(loss),
    jax.jacrev(jax.grad(loss)),
    lambda w: jax.jvp(jax.grad(loss), (w,), (w,)),
  ):
    with pytest.raises(NotImplementedError, match="saved_activations: compute"):
      jax.eval_shape(second, w)
  # A second derivative in something else is no business of the product's.
  other = jax.grad(lambda b: jnp.sum(jax.grad(lambda w: jnp.sum(b**3 * matmul(x, w, SAVED)))(w)))
  assert np.isfinite(compiled(other)(1.0))
