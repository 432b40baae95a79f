"""MXFP8 products, a scale for every 32 of what is contracted, against the same by hand in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  E4M3,
  E5M2,
  Product,
  compiled,
  examples,
  held_in_blocks,
  matmul,
  normal,
  products,
  tensors,
  with_gradients,
)


def held_along(x, axis, dtype=E4M3):
  return np.moveaxis(held_in_blocks(np.moveaxis(x, axis, -1), dtype)[0], -1, axis)


def test_block_products_are_as_by_hand():
  for gradient in ("e4m3fn", "e5m2"):
    run = with_gradients(lambda x, w, g=gradient: matmul(x, w, {"recipe": "mx", "gradient_dtype": g}))
    of_gradient = E4M3 if gradient == "e4m3fn" else E5M2
    for magnitude in (1e-18, 1.0, 1e18):
      x, w, ct = normal(32, 64, scale=magnitude), normal(64, 96, seed=1), normal(32, 96, seed=2, scale=1e-9)
      x *= 10.0 ** np.random.default_rng(9).uniform(-4, 0, size=x.shape).astype(np.float32)
      factors = (
        (held_along(x, 1), held_along(w, 0)),
        (held_along(ct, 1, of_gradient), held_along(w, 1).T),
        (held_along(x, 0).T, held_along(ct, 0, of_gradient)),
      )
      for got, (a, b) in zip(run(x, w, ct), factors, strict=True):
        assert (np.abs(got - a @ b) <= 2.0**-17 * (np.abs(a) @ np.abs(b))).all(), (magnitude, gradient)


@pytest.mark.slow
@examples(6)
@given(products(multiple=32), tensors(-18, 18), tensors(-18, 18))
def test_blocks_run_along_the_contracted_dimensions_in_their_order(case, lhs, rhs):
  contracted = np.prod(case.shape(case.contracted), dtype=int)
  if contracted % 32:
    case = Product(case.lhs + "z", case.rhs + "z", case.batch, case.contracted + "z", case.sizes | {"z": 32})
  lhs, rhs = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs))
  out = fp8_dot_general(lhs, rhs, case.dims, "mx")

  def by_hand(x, letters):
    own = [c for c in letters if c not in case.contracted]
    ordered = np.einsum(f"{letters}->{''.join(own)}{case.contracted}", x)
    rows = ordered.reshape(*ordered.shape[: len(own)], -1)
    return np.einsum(
      f"{''.join(own)}{case.contracted}->{letters}", held_in_blocks(rows, E4M3)[0].reshape(ordered.shape)
    )

  a, b = by_hand(lhs, case.lhs), by_hand(rhs, case.rhs)
  spec = f"{case.lhs},{case.rhs}->{case.out}"
  size = np.einsum(spec, np.abs(a), np.abs(b))
  assert (np.abs(out - np.einsum(spec, a, b)) <= 2.0**-16 * size + 1e-35).all()


def test_vmap_of_blocks():
  x, w = normal(3, 32, 64), normal(64, 32, seed=1)
  got, want = compiled(
    lambda x: (jax.vmap(lambda x: matmul(x, w, "mx"))(x), jnp.stack([matmul(m, w, "mx") for m in x]))
  )(x)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_size_that_blocks_do_not_divide_is_refused_with_its_reason():
  # Backward contracts the free dimensions.
  for shapes in (((32, 33), (33, 32)), ((20, 64), (64, 32)), ((32, 64), (64, 20))):
    with pytest.raises(ValueError, match=r"32 divides|multiple of 32"):
      jax.eval_shape(jax.grad(lambda x, w: jnp.sum(matmul(x, w, "mx")), (0, 1)), *map(np.ones, shapes))
