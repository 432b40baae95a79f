"""Products by recipe: `per_channel` and `nvfp4` by hand, and `backward: compute`."""

import functools

import jax
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
  compiled,
  held,
  matmul,
  normal,
  relative,
  scale_for,
  with_gradients,
)

# Tests of rounding.
pytestmark = pytest.mark.optimised

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
