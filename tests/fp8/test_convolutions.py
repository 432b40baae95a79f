"""Convolutions that are matrix products are FP8, and no others."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import jit
from tests.fp8._programs import D, by_path, fp8, kinds, traced
from tests.fp8._reference import normal, relative

CONVOLUTIONS = {
  "1x1": ((1, 1), (1, 1), "VALID"),
  "1x1 strided": ((1, 1), (2, 2), "SAME"),
  "1x1 of two strides": ((1, 1), (3, 2), "VALID"),
  "patches": ((4, 4), (4, 4), "VALID"),
  "patches that leave a rest": ((3, 3), (3, 3), "VALID"),
  "patches with gaps": ((2, 3), (3, 4), "VALID"),
  "oblong patches": ((2, 8), (2, 8), "SAME"),
  "the whole image": ((8, 8), (8, 8), "VALID"),
}
LAYOUTS = {
  "NHWC": ("NHWC", "HWIO", "NHWC"),
  "NCHW": ("NCHW", "OIHW", "NCHW"),
  "mixed": ("NHWC", "OHWI", "NCHW"),
}


def conv(kernel, strides, padding, layout, **options):
  image, filters, _ = LAYOUTS[layout]
  size = {"N": 16, "C": D, "H": 8, "W": 8}
  x = normal(*(size[c] for c in image), seed=1)
  size = {"I": D, "O": 16, "H": kernel[0], "W": kernel[1]}
  w = normal(*(size[c] for c in filters), seed=2) / np.sqrt(D * np.prod(kernel))
  return (
    lambda x, w: jax.lax.conv_general_dilated(
      x, w, strides, padding, dimension_numbers=LAYOUTS[layout], **options
    ),
    x,
    w,
  )


ALL = fp8(first_layer=True, last_layer=True)


@pytest.mark.parametrize(
  ("name", "layout"),
  [*((name, "NHWC") for name in CONVOLUTIONS), ("1x1 strided", "mixed"), ("patches with gaps", "NCHW")],
)
def test_convolutions_that_are_products(name, layout):
  fun, x, w = conv(*CONVOLUTIONS[name], layout)
  assert kinds(fun, x, w, policy=ALL) == "8"

  def both(fun):
    def loss(x, w):
      out = fun(x, w)
      return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, (0, 1), has_aux=True)(x, w)

  (grads, out), (exact, plain) = jit(lambda: (both(mpjax.autocast(fun, ALL)), both(fun)))()
  assert [a.shape for a in (out, *grads)] == [a.shape for a in (plain, x, w)]
  assert relative(out, plain) < 0.05
  for ours, reference in zip(grads, exact, strict=True):
    assert relative(ours, reference) < 0.15
    assert not np.asarray(ours)[np.asarray(reference) == 0].any()  # what no window covers


def test_both_backward_products_of_a_convolution():
  fun, x, w = conv(*CONVOLUTIONS["patches"], "NCHW")
  grads = jax.grad(lambda x, w: jnp.sum(jnp.sin(mpjax.autocast(fun, ALL)(x, w))), (0, 1))
  assert traced(grads, x, w) == [("4", "4"), ("4", "5"), ("5", "4")]


def test_convolutions_that_are_none():
  for layout, (kernel, strides, padding, options) in itertools.product(
    LAYOUTS,
    (
      ((3, 3), (1, 1), "SAME", {}),
      ((3, 3), (2, 2), "VALID", {}),
      ((4, 4), (4, 4), [(1, 1), (0, 0)], {}),
      ((2, 2), (2, 2), "VALID", {"rhs_dilation": (2, 2)}),
      ((1, 1), (1, 1), [(0, 0), (0, 0)], {"lhs_dilation": (2, 1)}),
      ((1, 1), (1, 1), "VALID", {"feature_group_count": 2}),
    ),
  ):
    fun, x, w = conv(kernel, strides, padding, layout, **options)
    if "feature_group_count" in options:
      w = np.take(w, range(16), LAYOUTS[layout][1].index("I"))
    (row,) = (row for row in mpjax.explain(fun, x, w, policy=ALL).rows if row.flops)
    assert row.after == "bfloat16", (layout, kernel, options)
    assert "overlap" in row.why or kernel != (3, 3)
    assert traced(mpjax.autocast(fun, ALL), x, w) == []


def test_convolutions_in_one_and_three_dimensions():
  policy = ALL
  for n in (1, 3):
    x, w = normal(4, *(4,) * n, 16), normal(*(2,) * n, 16, 32, seed=1) / 16
    letters = "XYZ"[:n]
    fun = lambda x, w, n=n, s=letters: jax.lax.conv_general_dilated(
      x, w, (2,) * n, "VALID", dimension_numbers=(f"N{s}C", f"{s}IO", f"N{s}C")
    )
    expected = "b" if n == 1 else "8"  # 4 x 2 rows are too few
    assert kinds(fun, x, w, policy=policy) == expected
    assert relative(jit(mpjax.autocast(fun, policy))(x, w), fun(x, w)) < 0.05


def test_a_vision_model():
  class Vision(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(D, (2, 2), (2, 2), name="patch")(x)
      x = nn.relu(nn.Conv(D, (3, 3), name="overlaps")(x))
      x = nn.relu(nn.Conv(D, (1, 1), name="point")(x))
      return nn.Dense(16, name="head")(x.mean((1, 2)))

  model, images = Vision(), normal(2, 8, 8, D)
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  assert by_path(model.apply, variables, images) == {
    "Vision/patch": "b",
    "Vision/overlaps": "b",
    "Vision/point": "8",
    "Vision/head": "b",
  }
