"""Whole models in plain float32 under autocast: which products are half, and training beside casts by hand."""

import collections
import functools
import math
import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.casting._jaxprs import OPTIONS, PRODUCTS as PRIMITIVES, equations, multiplied, walk
from tests.casting._models import MODELS, text_batch

HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# float16 needs a loss scale, bfloat16 none.
SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 2.0**10}
STEPS, LAST = 60, 10
# The share of the way that float32 has come down, by which the loss at the end may differ.
CURVE = {"bf16": 0.02, "fp16": 0.01}
# An error this small is as good as none, whatever that of the casts by hand.
NEGLIGIBLE = {"bf16": 4e-3, "fp16": 5e-4}
# Of the forward pass, and two for each in the backward pass; the input of a model has no gradient.
PRODUCTS = {"gpt": 27, "lstm": 9, "experts": 12}
ORDERS = ("grad of autocast", "autocast of grad")


def gradient(loss, scale):
  """(params, batch) -> loss, gradients with respect to params."""

  def fun(params, batch):
    value, grads = jax.value_and_grad(lambda params: loss(params, batch) * scale)(params)
    return value / scale, jax.tree.map(lambda g: g / scale, grads)

  return fun


def under_autocast(name, policy, order):
  loss = MODELS[name].loss(None)
  if order == ORDERS[0]:
    return gradient(mpjax.autocast(loss, policy), SCALE[policy])
  return mpjax.autocast(gradient(loss, SCALE[policy]), policy)


@functools.cache
def initial(name):
  return MODELS[name].init()


@functools.cache
def traced(name, policy, kind):
  """A gradient: `plain`, `by hand`, or autocast in one of the two orders, where no reduction may be half precision."""
  if kind in ORDERS:
    fun = under_autocast(name, policy, kind)
  else:
    fun = gradient(MODELS[name].loss(HALF.get(policy)), SCALE[policy])
  before = jax.config.jax_allow_f16_reductions
  jax.config.update("jax_allow_f16_reductions", kind not in ORDERS)
  try:
    return jax.jit(fun, compiler_options=OPTIONS).trace(initial(name), text_batch(0))
  finally:
    jax.config.update("jax_allow_f16_reductions", before)


@functools.cache
def program(name, policy, kind):
  return traced(name, policy, kind).lower().compile()


@functools.cache
def first_step(name, policy, kind):
  return program(name, policy, kind)(initial(name), text_batch(0))


ADAM = optax.adam(3e-3)


@functools.partial(jax.jit, compiler_options=OPTIONS)
def update(grads, inner, params):
  updates, inner = ADAM.update(grads, inner)
  return optax.apply_updates(params, updates), inner


@functools.cache
def curve(name, policy, kind):
  """The losses of some steps of Adam."""
  params, step = initial(name), program(name, policy, kind)
  inner = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(ADAM.init, params))
  losses = []
  for i in range(STEPS):
    value, grads = step(params, text_batch(i))
    params, inner = update(grads, inner, params)
    losses.append(float(value))
  return np.asarray(losses)


def errors(tree, reference):
  """Relative error of each leaf; one that is about zero is measured against the largest."""
  exact = jax.tree.leaves(jax.tree.map(lambda x: np.asarray(x, np.float64), reference))
  size = [np.linalg.norm(x) / math.sqrt(max(x.size, 1)) for x in exact]
  least = 1e-2 * max(size, default=0)
  error = lambda x, y: np.linalg.norm(np.asarray(x, np.float64) - y) / math.sqrt(max(y.size, 1))
  return [error(x, y) / max(s, least) for x, y, s in zip(jax.tree.leaves(tree), exact, size, strict=True)]


@pytest.mark.parametrize(("policy", "order"), [("bf16", ORDERS[0]), ("fp16", ORDERS[1])])
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_half_precision_and_no_reduction_is(name, policy, order):
  """Forward and backward: JAX itself refuses a half-precision reduction where it is told to."""
  found = [multiplied(e) for e in walk(traced(name, policy, order).jaxpr) if e.primitive.name in PRIMITIVES]
  half = {"bf16": "bf16 bf16", "fp16": "f16 f16"}[policy]
  assert collections.Counter(found) == {half: PRODUCTS[name]}  # none is computed twice


def batch_norm(x):  # [B, C, H, W]
  mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
  return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def convolutional(params, x):
  """A residual block with batch statistics, a strided convolution, a depthwise one, pooling and a head."""
  conv = functools.partial(jax.lax.conv_general_dilated, padding="SAME")
  x = jax.nn.relu(batch_norm(conv(x, params["stem"], (2, 2))))
  x = x + batch_norm(conv(jax.nn.relu(batch_norm(conv(x, params["in"], (1, 1)))), params["out"], (1, 1)))
  x = jax.nn.silu(batch_norm(conv(x, params["depthwise"], (1, 1), feature_group_count=4)))
  x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
  return jnp.mean((x.mean((2, 3)) @ params["head"]) ** 2)


@pytest.mark.parametrize(("policy", "half"), [("bf16", "bf16 bf16"), ("fp16", "f16 f16")])
def test_every_convolution_is_half_precision_and_none_is_computed_twice(policy, half):
  shapes = {
    "stem": (4, 3, 3, 3),
    "in": (4, 4, 3, 3),
    "out": (4, 4, 3, 3),
    "depthwise": (4, 1, 3, 3),
    "head": (4, 5),
  }
  params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
  x = jax.ShapeDtypeStruct((2, 3, 8, 8), np.float32)
  cast = mpjax.autocast(policy=policy)
  for gradients in (jax.grad(cast(convolutional)), cast(jax.grad(convolutional))):
    found = [multiplied(e) for e in equations(gradients, params, x) if e.primitive.name in PRIMITIVES]
    # Three for each of five, but for the gradient of the input.
    assert collections.Counter(found) == {half: 14}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "order"), [("bf16", ORDERS[1]), ("fp16", ORDERS[0])])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_float32_as_those_of_casts_by_hand(name, policy, order):
  value, grads = first_step(name, "fp32", "plain")
  hand_value, hand = first_step(name, policy, "by hand")
  our_value, ours = first_step(name, policy, order)
  jax.tree.map(lambda a, b: np.testing.assert_equal((a.dtype, a.shape), (b.dtype, b.shape)), ours, grads)
  least = NEGLIGIBLE[policy]
  assert max(errors(ours, grads)) <= max(1.5 * max(errors(hand, grads)), least)
  assert np.mean(errors(ours, grads)) <= max(1.5 * np.mean(errors(hand, grads)), least)
  assert abs(our_value - value) <= max(1.5 * abs(hand_value - value), least * abs(value))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("gpt", "fp16"), ("lstm", "bf16"), ("experts", "bf16")])
def test_the_training_curve_is_that_of_casts_by_hand_and_of_float32(name, policy):
  plain = curve(name, "fp32", "plain")
  hand = curve(name, policy, "by hand")
  ours = curve(name, policy, ORDERS[0])
  way = plain[:LAST].mean() - plain[-LAST:].mean()
  assert way > 0.2  # it learns
  for other in (hand, plain):
    assert abs(ours[-LAST:].mean() - other[-LAST:].mean()) <= CURVE[policy] * way
    assert np.abs(ours - other).mean() <= 2 * CURVE[policy] * way


def residuals(loss, params, batch, capsys):
  """(dtype, number of elements, origin) of what is saved for the backward pass, arguments left out."""
  capsys.readouterr()
  jax.ad_checkpoint.print_saved_residuals(lambda params: loss(params, batch), params)
  lines = re.findall(r"^(\w+)\[([\d,]*)\] (.*)$", capsys.readouterr().out, re.MULTILINE)
  assert lines
  return [
    (dtype, math.prod(map(int, filter(None, shape.split(",")))), origin)
    for dtype, shape, origin in lines
    if "from the argument" not in origin and "from a constant" not in origin  # the batch
  ]


@pytest.mark.parametrize("policy", HALF)
def test_activations_saved_for_the_backward_pass_are_half_precision(policy, capsys):
  model = MODELS["gpt"]
  params, batch = initial("gpt"), text_batch(0)
  full = batch["x"].size * 32  # [B, T, D]
  ours = residuals(mpjax.autocast(model.loss(None), policy), params, batch, capsys)
  assert not [line for line in ours if line[0] == "f32" and line[1] >= full]
  size = {"f32": 4, "i32": 4, "ui32": 4, "bf16": 2, "f16": 2, "bool": 1}
  by_hand = residuals(model.loss(HALF[policy]), params, batch, capsys)
  total = lambda found: sum(size[dtype] * n for dtype, n, _ in found)
  assert total(ours) <= total(by_hand)
