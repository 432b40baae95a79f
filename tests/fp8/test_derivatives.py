"""Derivatives of programs with FP8 products: which products they have, and that they are near bfloat16's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests.casting._jaxprs import jit
from tests.fp8._programs import FUNCTIONS, D, W, X, fp8, loss, mean_of, traced, weights_of
from tests.fp8._reference import normal, relative

SLOW = {"reverse over forward", "forward over reverse", "vmap over weights"}
marked = lambda names: [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


def gradients(name):
  """Gradients of autocast, and autocast's of gradients: both not yet jitted."""
  inner = mean_of(FUNCTIONS[name][0])
  return jax.grad(mpjax.autocast(inner, fp8()), (0, 1)), mpjax.autocast(jax.grad(inner, (0, 1)), fp8())


# Nothing is left of a derivative rule in a gradient; and where a program ends in a cond, two backward products are
# not known for what they are and stay in bfloat16.
OTHER_PRODUCTS = ("custom_vjp", "custom_jvp", "cond at the end")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "while"])
def test_both_backward_products_are_fp8_and_gradients_e5m2_in_either_order(name):
  outside, inside = gradients(name)
  w = weights_of(name)
  products = traced(outside, w, X)
  n = FUNCTIONS[name][1].count("8")
  assert products.count(("4", "4")) == n * (2 if "remat" in name else 1)
  assert products.count(("4", "5")) == products.count(("5", "4")) == n
  if name not in OTHER_PRODUCTS:
    unordered = lambda pairs: sorted("".join(sorted(pair)) for pair in pairs)
    assert unordered(traced(inside, w, X)) == unordered(products)


VALUES = "scan of remat", "cond at the end", "vmap over weights", "attention", "custom_vjp"


@pytest.mark.parametrize("name", marked(VALUES))
def test_gradients_are_near_those_of_bfloat16(name):
  outside, inside = gradients(name)
  w = weights_of(name)
  bf16 = jax.grad(mpjax.autocast(mean_of(FUNCTIONS[name][0]), "bf16"), (0, 1))
  half, ours, inner = jit(lambda w, x: [fun(w, x) for fun in (bf16, outside, inside)])(w, X)
  assert 1e-4 < relative(ours, half) < 0.2
  assert 1e-4 < relative(inner, half) < 0.2


DIRECTION = [normal(D, D, seed=i + 20) / 6 for i in range(3)]


def inner_product(a, b):
  return sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))


DERIVATIVES = {
  "forward": (lambda f: lambda w: jax.jvp(f, (w,), (DIRECTION,))[1], 0.1),
  "twice": (lambda f: jax.grad(lambda w: inner_product(jax.grad(f)(w), DIRECTION)), 0.3),
  "forward over reverse": (lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (DIRECTION,))[1], 0.3),
  "reverse over forward": (lambda f: jax.grad(lambda w: jax.jvp(f, (w,), (DIRECTION,))[1]), 0.3),
}


@pytest.mark.parametrize("name", marked(DERIVATIVES))
def test_other_derivatives_are_near_those_of_bfloat16(name):
  derivative, bound = DERIVATIVES[name]
  fun = lambda w: loss(w, X)
  bf16, outside = (derivative(mpjax.autocast(fun, policy)) for policy in ("bf16", fp8()))
  inside = mpjax.autocast(derivative(fun), fp8())
  half, ours, inner = jit(lambda w: [fun(w) for fun in (bf16, outside, inside)])(W[:3])
  assert 1e-4 < relative(ours, half) < bound
  assert 1e-4 < relative(inner, half) < bound


POLICIES = jax.checkpoint_policies


def test_a_checkpoint_policy_that_keeps_products_keeps_fp8_ones():
  for policy, again in (
    (None, 3),
    (POLICIES.everything_saveable, 0),
    (POLICIES.dots_saveable, 0),
    (POLICIES.dots_with_no_batch_dims_saveable, 0),
    (POLICIES.save_only_these_names("none"), 3),
  ):
    fun = jax.checkpoint(loss, policy=policy)
    assert len(traced(jax.grad(mpjax.autocast(fun, fp8())), W, X)) == 9 + again, policy
  for recompute in ("islands", "nothing"):
    assert len(traced(jax.grad(mpjax.autocast(loss, fp8(), recompute=recompute)), W, X)) == 9, recompute
