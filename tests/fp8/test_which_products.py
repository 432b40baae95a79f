"""Which products are FP8 under autocast, in every kind of program, and what is said of those that are not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.fp8._programs import (
  FUNCTIONS,
  SCANNED,
  SIX,
  TOKENS,
  D,
  W,
  X,
  attention,
  fp8,
  kinds,
  mean_of,
  mlp,
  one_hot,
  tied,
  traced,
  weights,
  weights_of,
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_of_plain_functions(name):
  fun, expected = FUNCTIONS[name]
  w = weights_of(name)
  assert kinds(fun, w, X) == expected
  assert len(traced(mpjax.autocast(fun, fp8()), w, X)) == expected.count("8")


def test_an_embedding_is_the_first_layer():
  assert kinds(tied, W, TOKENS) == "8888b"
  assert kinds(one_hot, W, TOKENS) == "b888b"


# Sizes of layers, the recipe, and the kinds of the products.
RECIPES = [
  ((D,) * 6, {"first_layer": True}, "8888b"),
  ((D,) * 6, {"last_layer": True}, "b8888"),
  ((D,) * 6, {"first_layer": True, "last_layer": True}, "88888"),
  ((D,) * 6, {"min_dim": 64}, "bbbbb"),
  ((D,) * 6, {"min_dim": 32}, "b888b"),
  ((D,) * 6, {"recipe": "mx"}, "b888b"),
  ((D, D, 40, D, D, D), {}, "bbb8b"),
  ((D, D, 48, D, D, D), {}, "b888b"),
  ((D, D, 48, D, D, D), {"recipe": "mx"}, "bbb8b"),
  ((D, D, 8, D, D, D), {}, "bbb8b"),
  ((D, D, D, D, 10), {}, "b88b"),
]


def test_options_and_sizes():
  for row in RECIPES:
    sizes, options, expected = row
    assert kinds(mlp, weights(*sizes), X, policy=fp8(**options)) == expected, row
  assert kinds(attention, SIX, X, policy=fp8(attention=True)) == "b888888b"


def test_vmap_outside_leaves_rows_that_are_too_few():
  def outside(w, x):
    return jax.vmap(mpjax.autocast(functools.partial(mlp, w), fp8()))(x)

  assert traced(outside, W, X) == []  # each call sees a vector
  assert traced(outside, W, jnp.stack([X, X])) == [("4", "4")] * 3


def test_a_dimension_that_is_symbolic_may_be_no_multiple_of_16():
  (rows,) = jax.export.symbolic_shape("rows")
  explanation = mpjax.explain(mlp, W, jax.ShapeDtypeStruct((rows, D), jnp.float32), policy=fp8())
  whys = [row.why for row in explanation.rows if row.primitive == "dot_general"]
  assert all("symbolic" in why for why in whys[1:-1])


# What is said


def test_reasons():
  rows = [row for row in mpjax.explain(mlp, W, X, policy=fp8()).rows if row.flops]
  assert ["first layer" in rows[0].why, "last layer" in rows[-1].why] == [True, True]
  assert {row.why for row in rows[1:-1]} == {
    "an FP8 product (current scaling, E4M3FN forward, E5M2 backward)"
  }
  reason = lambda fun, w, x=X, **options: [
    row.why for row in mpjax.explain(fun, w, x, policy=fp8(**options)).rows if row.flops
  ]
  assert sum("two activations" in why for why in reason(attention, SIX)) == 2
  assert any("M=32 x K=32 x N=40: N is not a mul" in why for why in reason(mlp, weights(D, D, 40, D, D)))
  assert any("M=8 x K=32 x N=32: M is not a multiple of 16" in why for why in reason(mlp, W, X[:8]))
  assert any("smaller than fp8.min_dim=64" in why for why in reason(mlp, W, min_dim=64))
  assert any("custom derivative rule" in why for why in reason(*[FUNCTIONS["custom_vjp"][0], W]))


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_convolutions_stay_in_the_compute_dtype(kernel):
  images, filters = np.ones((2, 8, 8, D), np.float32), np.ones((kernel, kernel, D, D), np.float32)
  layout = ("NHWC", "HWIO", "NHWC")

  def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (kernel, kernel), "VALID", dimension_numbers=layout)

  policy = fp8(first_layer=True, last_layer=True)
  rows = [row for row in mpjax.explain(conv, images, filters, policy=policy).rows if row.flops]
  assert [(row.after, row.why) for row in rows] == [("bfloat16", "not FP8: it is a convolution")]
  assert traced(jax.grad(lambda x, w: mpjax.autocast(conv, policy)(x, w).sum()), images, filters) == []


def test_flops_in_a_scan_count_for_each_step():
  fun = FUNCTIONS["scan"][0]
  flops = mpjax.explain(fun, SCANNED, X, policy=fp8()).matrix_flops()
  assert flops == {"float8_e4m3fn": 3 * 2 * D**3, "bfloat16": 2 * 2 * D**3}


# The last layers

TEN = weights(*[D] * 11)
STACK = (TEN[0], np.stack(TEN[1:9]), TEN[9])
EVERY = {"first_layer": True, "last_layer": True}
# keep_last, and the kinds of ten products with a weight, unrolled and with eight in a scan.
KEPT = [
  (0, "8888888888", "888"),
  (0.1, "888888888b", "88b"),
  (0.15, "88888888bb", "88b"),
  (0.5, "88888bbbbb", "88b"),
  (0.9, "8bbbbbbbbb", "8bb"),
  (1, "bbbbbbbbbb", "bbb"),
]


@pytest.mark.parametrize(("share", "unrolled", "scanned"), KEPT)
def test_the_last_share_of_products_with_a_weight_stays(share, unrolled, scanned):
  policy = fp8(keep_last=share, **EVERY)
  scan = FUNCTIONS["scan"][0]
  assert kinds(mlp, TEN, X, policy=policy) == unrolled
  assert kinds(scan, STACK, X, policy=policy) == scanned
  # Of a whole step, too: the backward products of a layer that stays in bfloat16 stay with it.
  for fun, w, forward in ((mlp, TEN, unrolled), (scan, STACK, scanned)):
    step = lambda w, x, fun=fun: jax.grad(lambda w, x: mean_of(fun)(w, x), (0, 1))(w, x)
    found = kinds(step, w, X, policy=policy)
    assert found.count("8") == 3 * forward.count("8"), found
    assert found.startswith(forward)


def test_nvfp4_keeps_the_last_layers_and_says_so():
  rows = [row for row in mpjax.explain(mlp, TEN, X, policy=fp8(recipe="nvfp4", **EVERY)).rows if row.flops]
  assert [row.after for row in rows] == ["float4_e2m1fn"] * 8 + ["bfloat16"] * 2
  assert "fp8.keep_last=0.15" in rows[-1].why
