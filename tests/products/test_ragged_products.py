"""The FP8 product of experts: values and gradients against float64 by expert, transforms, and what is lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fp8._reference import (
  AMD,
  E4M3,
  E4M3_AMD,
  E5M2,
  FORMATS,
  bits,
  compiled,
  lowered,
  normal,
  ragged_dot,
  relative,
  rounded,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

SIZES = np.int32([96, 0, 120, 24])  # one expert without rows, and rows without an expert
ROWS, K, N, EXPERTS = 256, 64, 48, len(SIZES)
SIZE_OF = np.float32([1, 1, 1e-4, 30])  # of each expert's gradients and weights
OF_EXPERT = np.repeat(np.float32([*SIZE_OF, 1]), [*SIZES, ROWS - SIZES.sum()])[:, None]


def operands(seed=0):
  x, w, ct = normal(ROWS, K, seed=seed), normal(EXPERTS, K, N, seed=seed + 1), normal(ROWS, N, seed=seed + 2)
  x[:, 3] *= 100  # a channel with outliers
  return x, w * SIZE_OF[:, None, None], ct * OF_EXPERT


def by_expert(x, w, ct, held=lambda x, axis, dtype: x, gradient=E5M2, forward=E4M3):
  """The product and both gradients, expert after expert in float64."""
  x, w, ct = (np.asarray(a, np.float64) for a in (x, w, ct))
  out, dx, dw = np.zeros((ROWS, N)), np.zeros(x.shape), np.zeros(w.shape)
  for e, end in enumerate(np.cumsum(SIZES)):
    rows = slice(end - SIZES[e], end)
    out[rows] = held(x[rows], 1, forward) @ held(w[e], 0, forward)
    dx[rows] = held(ct[rows], 1, gradient) @ held(w[e], 1, forward).T
    dw[e] = held(x[rows], 0, forward).T @ held(ct[rows], 0, gradient)
  return out, dx, dw


def held(x, axis, dtype):
  """What `x` is after quantisation with a scale for the values along an axis."""
  amax = np.max(np.abs(x), axis, keepdims=True, initial=0).astype(np.float32)
  scale = np.where(amax > 0, np.float32(FORMATS[dtype][2]) / np.where(amax > 0, amax, 1), np.float32(1))
  return rounded(np.float32(x) * scale, dtype) / scale


def fp8(recipe="per_channel", **options):
  return lambda x, w: ragged_dot(x, w, SIZES, recipe, **options)


WIDE = (("recipe", "per_channel"), ("gradient_dtype", "e5m2"))  # the user's own format of gradients


def test_values_and_gradients_are_those_of_float64_by_expert():
  cases = {
    "per_channel": (E4M3, E4M3),
    "nvfp4": (E4M3, E4M3),
    "delayed": (E4M3, E4M3),
    WIDE: (E4M3, E5M2),
    (("recipe", "current"), ("forward_dtype", "e5m2"), ("gradient_dtype", "e4m3fn")): (E5M2, E4M3),
    (("recipe", "current"), *AMD.items()): (E4M3_AMD, E4M3_AMD),
  }
  for recipe, (forward, gradient) in cases.items():
    got = with_gradients(fp8(recipe))(*operands())
    want = by_expert(*operands(), held, gradient, forward)
    for a, b in zip(got, want, strict=True):
      assert relative(a, b) < 1e-6, recipe
      np.testing.assert_array_equal(np.asarray(a)[b == 0], 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_expert_keeps_its_digits_and_weights_have_float32_gradients(dtype):
  x, w, ct = operands()
  got = with_gradients(fp8(out_dtype=dtype))(x.astype(dtype), w, ct)
  assert [a.dtype.name for a in got] == [dtype, dtype, "float32"]
  want = by_expert(x, w, ct)
  for e in (0, 3) if dtype == "float16" else (0, 2, 3):  # the gradients of expert 2 are subnormal there
    rows = slice(SIZES[:e].sum(), SIZES[: e + 1].sum())
    assert relative(got[0][rows], want[0][rows]) < 0.05
    assert relative(got[1][rows], want[1][rows]) < 0.05
    assert relative(got[2][e], want[2][e]) < 0.05
  assert np.mean(np.asarray(got[2][0]) == np.asarray(got[2][0].astype(jnp.bfloat16))) < 0.02


def test_a_backward_pass_in_the_compute_dtype():
  x, w, ct = operands()
  recipe = {"recipe": "current", "backward": "compute"}
  out, dx, dw = with_gradients(fp8(recipe, out_dtype="bfloat16"))(x.astype("bfloat16"), w, ct)
  want = by_expert(x, w, ct)
  assert relative(out, want[0]) > 0.01
  assert [relative(dx, want[1]) < 0.005, relative(dw, want[2]) < 0.005] == [True, True]


def test_values_that_are_not_finite_reach_their_own_row_and_columns():
  x, w, ct = operands()
  x[5, 7], ct[100, 2] = np.nan, np.inf
  out, dx, dw = with_gradients(fp8())(x, w, ct)
  assert [*np.flatnonzero(~np.isfinite(out).all(1))] == [5]
  assert [*np.flatnonzero(~np.isfinite(dx).all(1))] == [100]
  bad = {(int(e), int(k), int(n)) for e, k, n in np.argwhere(~np.isfinite(dw))}
  assert bad == {(0, 7, n) for n in range(N)} | {(2, k, 2) for k in range(K)}


def test_transforms_change_no_bit():
  many = [operands(seed) for seed in (0, 10, 20)]
  x, w, ct = (np.stack(each) for each in zip(*many, strict=True))
  sizes = np.stack([SIZES, SIZES[::-1], SIZES])
  plain = lambda x, w, sizes: ragged_dot(x, w, sizes, WIDE, out_dtype="bfloat16")

  def of(fun):
    def run(x, w, sizes, ct):
      out, back = jax.vjp(lambda x, w: fun(x, w, sizes), x, w)
      return out, *back(ct.astype(out.dtype))

    return run

  one_by_one = [compiled(of(plain))(*each) for each in zip(x, w, sizes, ct, strict=True)]
  want = [np.stack(each) for each in zip(*one_by_one, strict=True)]
  scanned = lambda x, w, sizes: jax.lax.scan(lambda _, each: (None, plain(*each)), None, (x, w, sizes))[1]
  ways = {
    "vmap": compiled(of(jax.vmap(plain))),
    "vmap of gradients": compiled(jax.vmap(of(plain))),
    "scan": compiled(of(scanned)),
    "remat": compiled(of(jax.vmap(jax.checkpoint(plain)))),
    "eager": of(jax.vmap(plain)),
  }
  for name, run in ways.items():
    for a, b in zip(run(x, w, sizes, ct), want, strict=True):
      np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def test_tangents_are_those_of_a_bilinear_function():
  x, w, _ = operands()
  dx, dw, _ = operands(5)
  tangent = compiled(lambda *args: jax.jvp(fp8(), args[:2], args[2:])[1])(x, w, dx, dw)
  assert relative(tangent, by_expert(dx, w, tangent)[0] + by_expert(x, dw, tangent)[0]) < 0.04


def test_shards_have_scales_of_their_own_rows():
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  x, w, ct = operands()
  own = np.int32([40, 0, 60, 12])
  plain = lambda x, w: ragged_dot(x, w, own)
  split = jax.shard_map(plain, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
  halves = [with_gradients(plain)(a, w, b) for a, b in zip(np.split(x, 2), np.split(ct, 2), strict=True)]
  got = with_gradients(split)(x, w, ct)
  np.testing.assert_array_equal(bits(got[0]), bits(np.concatenate([half[0] for half in halves])))
  np.testing.assert_array_equal(bits(got[2]), bits(halves[0][2] + halves[1][2]))


@pytest.mark.parametrize(
  ("platform", "native", "expected"),
  [
    ("cuda", None, ["f8E4M3FN", "f8E5M2"]),
    ("tpu", True, ["f8E4M3FN", "f8E5M2"]),
    ("cuda", False, ["bf16", "bf16"]),
  ],
)
def test_operands_of_the_lowered_products(platform, native, expected):
  args = [a.astype(jnp.bfloat16) for a in operands()]
  run = with_gradients(fp8(WIDE, native=native, out_dtype="bfloat16"))
  forward, gradient = expected
  pairs = (forward, forward), (gradient, forward), (forward, gradient)
  assert sorted(lowered(run.__wrapped__, *args, platform=platform)) == sorted(
    (*pair, "bf16") for pair in pairs
  )
