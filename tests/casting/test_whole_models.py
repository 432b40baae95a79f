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
from flax import nnx

import mpjax
from tests.casting._jaxprs import OPTIONS
from tests.casting._models import MODELS, ConvNet, ViT, cross_entropy

HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MLIR = {"bf16": "bf16", "fp16": "f16"}
# float16 needs a loss scale, bfloat16 none.
SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 2.0**10}
STEPS, LAST = 60, 10
# The share of the way that float32 has come down, by which the loss at the end may differ.
CURVE = {"bf16": 0.02, "fp16": 0.01}
# An error this small is as good as none, whatever that of the casts by hand.
NEGLIGIBLE = {"bf16": 4e-3, "fp16": 5e-4}
# Of the forward pass, and two for each in the backward pass; the input of a model has no gradient.
PRODUCTS = {"gpt": 27, "vit": 23, "resnet": 20, "convnet": 17, "lstm": 9, "experts": 12, "unet": 52}
ORDERS = ("grad of autocast", "autocast of grad")


def gradient(loss, scale):
  """(params, state, batch) -> loss, gradients with respect to params, new state."""

  def fun(params, state, batch):
    def scaled(params):
      value, new = loss(params, state, batch)
      return value * scale, (value, new)

    grads, (value, new) = jax.grad(scaled, has_aux=True)(params)
    return value, jax.tree.map(lambda g: g / scale, grads), new

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
    return jax.jit(fun, compiler_options=OPTIONS).trace(*initial(name), MODELS[name].batch(0))
  finally:
    jax.config.update("jax_allow_f16_reductions", before)


@functools.cache
def program(name, policy, kind):
  return traced(name, policy, kind).lower().compile()


@functools.cache
def first_step(name, policy, kind):
  model = MODELS[name]
  return program(name, policy, kind)(*initial(name), model.batch(0))


ADAM = optax.adam(3e-3)


@functools.partial(jax.jit, compiler_options=OPTIONS)
def update(grads, inner, params):
  updates, inner = ADAM.update(grads, inner)
  return optax.apply_updates(params, updates), inner


@functools.cache
def curve(name, policy, kind):
  """The losses of some steps of Adam."""
  model, step = MODELS[name], program(name, policy, kind)
  params, state = initial(name)
  inner = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(ADAM.init, params))
  losses = []
  for i in range(STEPS):
    value, grads, state = step(params, state, model.batch(i))
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


def products(text):
  """How many products a StableHLO module has of each pair of operand dtypes; a function counts once a call."""
  product = re.compile(
    r"(?:stablehlo\.dot_general|stablehlo\.convolution|chlo\.ragged_dot)\W.* : \(tensor<(\S+)>, tensor<(\S+?)>[,)]"
  )
  own, calls, name = collections.defaultdict(collections.Counter), collections.defaultdict(list), None
  for line in text.splitlines():
    if head := re.search(r'func\.func .*?@("[^"]+"|[\w.]+)\(', line):
      name = head[1]
    elif found := product.search(line):
      own[name][tuple(shape.split("x")[-1] for shape in found.groups())] += 1
    elif called := re.search(r'\bcall @("[^"]+"|[\w.]+)\(', line):
      calls[name].append(called[1])

  def total(name):
    return sum((total(other) for other in calls[name]), own[name])

  return total("main")


def lowered(program, platform):
  return program.lower(lowering_platforms=(platform,)).as_text()


@functools.cache
def products_of_float32(name, platform):
  return products(lowered(traced(name, "fp32", "plain"), platform))


@pytest.mark.parametrize(
  ("policy", "platform", "order"),
  [
    ("bf16", "tpu", ORDERS[0]),
    ("fp16", "cuda", ORDERS[0]),
    ("fp16", "tpu", ORDERS[1]),
    ("bf16", "cuda", ORDERS[1]),
  ],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_half_precision_and_no_reduction_is(name, policy, platform, order):
  """Forward and backward: JAX itself refuses a half-precision reduction where it is told to."""
  found = products(lowered(traced(name, policy, order), platform))
  plain = products_of_float32(name, platform)
  assert set(plain) == {("f32", "f32")}
  assert set(found) == {(MLIR[policy], MLIR[policy])}, found
  assert found.total() == plain.total() == PRODUCTS[name]  # none is computed twice


def test_the_count_sees_products_of_called_functions_and_of_mixed_dtypes():
  inner = jax.jit(lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32))
  x = jnp.ones((2, 2))
  half = x.astype(jnp.bfloat16)
  fun = lambda x, y: (
    inner(x, x),
    inner(x + 1, x),
    inner(y, y),
    jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  )
  assert products(lowered(jax.jit(fun).trace(x, half), "cuda")) == {("f32", "f32"): 3, ("bf16", "bf16"): 1}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_float32_as_those_of_casts_by_hand(name, policy, order):
  value, grads, _ = first_step(name, "fp32", "plain")
  hand_value, hand, _ = first_step(name, policy, "by hand")
  our_value, ours, _ = first_step(name, policy, order)
  jax.tree.map(lambda a, b: np.testing.assert_equal((a.dtype, a.shape), (b.dtype, b.shape)), ours, grads)
  least = NEGLIGIBLE[policy]
  assert max(errors(ours, grads)) <= max(1.5 * max(errors(hand, grads)), least)
  assert np.mean(errors(ours, grads)) <= max(1.5 * np.mean(errors(hand, grads)), least)
  assert abs(our_value - value) <= max(1.5 * abs(hand_value - value), least * abs(value))


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_the_training_curve_is_that_of_casts_by_hand_and_of_float32(name, policy):
  plain = curve(name, "fp32", "plain")
  hand = curve(name, policy, "by hand")
  ours = curve(name, policy, ORDERS[0])
  way = plain[:LAST].mean() - plain[-LAST:].mean()
  assert way > 0.2  # it learns
  for other in (hand, plain):
    assert abs(ours[-LAST:].mean() - other[-LAST:].mean()) <= CURVE[policy] * way
    assert np.abs(ours - other).mean() <= 2 * CURVE[policy] * way


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("name", ["resnet", "convnet"])
def test_batch_statistics_stay_float32_and_are_those_of_float32(name, policy, order):
  _, _, plain = first_step(name, "fp32", "plain")
  _, _, hand = first_step(name, policy, "by hand")
  _, _, ours = first_step(name, policy, order)
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(np.float32)}
  assert max(errors(ours, plain)) <= max(1.2 * max(errors(hand, plain)), NEGLIGIBLE[policy] / 4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize(("name", "build"), [("vit", ViT), ("convnet", ConvNet)])
def test_an_nnx_module_is_cast_and_changed_as_its_split_parts_are(name, build, policy):
  params, state = initial(name)
  graph = nnx.graphdef(nnx.eval_shape(lambda: build(None, nnx.Rngs(0))))
  loss = mpjax.autocast(lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]), policy)

  @functools.partial(jax.jit, compiler_options=OPTIONS)
  def step(params, state, batch):
    model = nnx.merge(graph, params, state, copy=True)
    value, grads = nnx.value_and_grad(lambda model: loss(model, batch) * SCALE[policy])(model)
    grads = jax.tree.map(lambda g: g / SCALE[policy], grads)
    return value / SCALE[policy], grads, nnx.split(model, nnx.Param, ...)[2]

  got = step(params, state, MODELS[name].batch(0))
  for ours, split in zip(got, first_step(name, policy, ORDERS[0]), strict=True):
    assert [x.dtype for x in jax.tree.leaves(ours)] == [x.dtype for x in jax.tree.leaves(split)]
    assert max(errors(ours, split), default=0) <= NEGLIGIBLE[policy] / 4


def residuals(loss, params, state, batch, capsys):
  """(dtype, number of elements, origin) of what is saved for the backward pass, arguments left out."""
  capsys.readouterr()
  jax.ad_checkpoint.print_saved_residuals(lambda params: loss(params, state, batch)[0], params)
  lines = re.findall(r"^(\w+)\[([\d,]*)\] (.*)$", capsys.readouterr().out, re.MULTILINE)
  assert lines
  return [
    (dtype, math.prod(map(int, filter(None, shape.split(",")))), origin)
    for dtype, shape, origin in lines
    if "from the argument" not in origin and "from a constant" not in origin  # the batch
  ]


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_activations_saved_for_the_backward_pass_are_half_precision(name, policy, capsys):
  model = MODELS[name]
  params, state = initial(name)
  batch = model.batch(0)
  full = {"gpt": batch["x"].size * 32, "vit": batch["y"].size * 5 * 32}[name]  # [B, T, D]
  ours = residuals(mpjax.autocast(model.loss(None), policy), params, state, batch, capsys)
  assert not [line for line in ours if line[0] == "f32" and line[1] >= full]
  size = {"f32": 4, "i32": 4, "ui32": 4, "bf16": 2, "f16": 2, "bool": 1}
  by_hand = residuals(model.loss(HALF[policy]), params, state, batch, capsys)
  total = lambda found: sum(size[dtype] * n for dtype, n, _ in found)
  assert total(ours) <= total(by_hand)
