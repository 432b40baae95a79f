"""The models: shapes, the dtype of every matrix product, dropout, rotations, BatchNorm, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.dtypes import cast_floating
from mpjax.zoo.models import GPT, ResNet, ViT

# Parts whose results can be written down.
from mpjax.zoo.models._gpt import rotate
from tests.casting._jaxprs import equations

HALF = {"bfloat16": 8e-3, "float16": 1e-3}  # twice the unit roundoff
VIT = ViT(num_classes=5, patch=2, dim=16, layers=1, heads=2)
RESNET = ResNet(num_classes=5, stages=(1, 1), width=4)
TOKENS = np.arange(16).reshape(2, 8)
IMAGES = np.random.default_rng(1).normal(size=(4, 4, 4, 1)).astype(np.float32) + 1


# The models, as functions of a parameter tree.


def make_gpt(**changes):
  sizes = {"vocab_size": 17, "max_len": 8, "dim": 16, "layers": 1, "heads": 2, "rngs": nnx.Rngs(0)}
  return GPT(**(sizes | changes))


@functools.cache
def gpt(**changes):
  graphdef, params = nnx.split(make_gpt(**changes))
  return jax.jit(lambda params, *args, **kwargs: nnx.merge(graphdef, params)(*args, **kwargs)), params


@functools.cache
def initialise(module):
  return jax.jit(lambda key: module.init(key, IMAGES, train=False))(jax.random.key(0))


OTHER_GPT = {"positions": "learned", "norm": "layer", "tie_head": False}
SHAPES = {"gpt": (2, 8, 17), "other gpt": (2, 8, 17), "vit": (4, 5), "resnet": (4, 5)}


@functools.cache
def case(name):
  """Returns a function of parameters, to logits, and parameters."""
  if "gpt" in name:
    model, params = gpt(**(OTHER_GPT if "other" in name else {}))
    return lambda params: model(params, TOKENS), params
  module = VIT if name == "vit" else RESNET
  variables = dict(initialise(module))
  params = variables.pop("params")

  def apply(params):
    x = IMAGES.astype(jax.tree.leaves(params)[0].dtype)
    return module.apply({"params": params, **variables}, x, train=True, mutable=["batch_stats"])[0]

  return apply, params


@functools.cache
def float32_logits(name):
  apply, params = case(name)
  return np.asarray(jax.jit(apply)(params))


def loss_and_logits(apply):
  def loss(params):
    logits = apply(params)
    return jnp.square(logits.astype(jnp.float32)).mean(), logits

  return jax.value_and_grad(loss, has_aux=True)


# Dtypes.


def product_dtypes(fun, *args):
  """Operand dtypes of each matrix product and convolution."""
  products = ("dot_general", "conv_general_dilated")
  found = [e for e in equations(fun, *args) if e.primitive.name in products]
  return [tuple(v.aval.dtype.name for v in e.invars[:2]) for e in found]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_gradients_and_every_product_have_the_dtype_of_the_parameters(name):
  apply, params = case(name)
  gradient = lambda params: loss_and_logits(apply)(params)[1]
  for dtype in ("float32", *HALF)[name != "gpt" :]:
    cast = cast_floating(params, dtype)
    logits, grads = jax.eval_shape(apply, cast), jax.eval_shape(gradient, cast)
    assert (logits.shape, logits.dtype) == (SHAPES[name], dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    products, more = product_dtypes(apply, cast), product_dtypes(gradient, cast)
    assert set(products) == set(more) == {(dtype, dtype)}
    # A product has two gradients, but that of the images is not asked for.
    assert len(more) >= 3 * len(products) - 1


@pytest.mark.parametrize("name", SHAPES)
def test_float16_logits_are_near_float32_and_every_parameter_has_a_gradient(name):
  apply, params = case(name)
  # BatchNorm scales that start at zero cut off what lies before them.
  ones = jax.tree.map(lambda p: np.asarray(p) if np.any(p) else np.ones_like(p), params)
  run = jax.jit(loss_and_logits(apply))
  (_, half), grads = run(cast_floating(ones, "float16"))
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(np.asarray(grad)).all(), path
    assert np.any(np.asarray(grad) != 0), path
  exact = np.asarray(jax.jit(apply)(ones))
  np.testing.assert_allclose(
    np.asarray(half, np.float32), exact, atol=8 * HALF["float16"] * np.abs(exact).max()
  )


def test_embedding_gradients_of_half_parameters_are_summed_in_float32():
  """A row that is used a thousand times would stall a bfloat16 sum."""
  model, params = gpt(tie_head=False)
  grad = jax.grad(lambda params: model(params, TOKENS).astype(jnp.float32).sum())
  sums = [e for e in equations(grad, cast_floating(params, "bfloat16")) if "scatter" in e.primitive.name]
  assert {e.outvars[0].aval.dtype.name for e in sums} == {"float32"}


# GPT.


def test_gpt_logits_depend_on_earlier_tokens_their_order_and_no_later_ones():
  changed, swapped = TOKENS.copy(), TOKENS.copy()
  changed[0, 5] = 16
  swapped[0, :2] = 1, 0
  for name in ("gpt", "other gpt"):
    model, params = gpt(**(OTHER_GPT if "other" in name else {}))
    params = jax.tree.map(lambda p: 3 * np.asarray(p), params)  # attention says little at first
    before, after, back = (np.asarray(model(params, tokens))[0] for tokens in (TOKENS, changed, swapped))
    np.testing.assert_allclose(before[:5], after[:5], rtol=1e-5, atol=1e-6)
    assert (np.abs(before[5:] - after[5:]).max(-1) > 1e-5).all(), name
    assert np.abs(before[3] - back[3]).max() > 1e-5, name


def test_gpt_dropout_needs_a_key_and_follows_it():
  (model, params), (plain, _) = gpt(dropout=0.5), gpt()
  one, two = jax.random.key(1), jax.random.key(2)
  kinds = lambda f, **keys: [e.primitive.name for e in equations(f, params, TOKENS, **keys)]
  assert kinds(model) == kinds(plain) == kinds(functools.partial(plain, rng=one))
  run = [np.asarray(model(params, TOKENS, rng=key)) for key in (one, one, two)]
  np.testing.assert_array_equal(run[0], run[1])
  assert not np.array_equal(run[0], run[2])
  assert not np.array_equal(run[0], float32_logits("gpt"))
  for dtype in HALF:
    traced = jax.eval_shape(model, cast_floating(params, dtype), TOKENS, rng=one)
    assert traced.dtype == dtype


def test_rotation_turns_pairs_by_the_position_times_their_frequency():
  x = np.random.default_rng(0).normal(size=(1, 2048, 1, 6)).astype(np.float32)
  pairs = x[..., :3] + 1j * x[..., 3:]
  frequency = 10000.0 ** (-np.arange(3) / 3)
  want = pairs * np.exp(1j * np.arange(2048)[:, None, None] * frequency)
  want = np.concatenate([want.real, want.imag], -1)
  turned = jax.jit(rotate)
  np.testing.assert_allclose(turned(x)[:, :5], want[:, :5], rtol=1e-5, atol=1e-6)
  # Angles of half precision are float32, far from the start, too.
  for dtype, roundoff in HALF.items():
    got = turned(x.astype(jnp.dtype(dtype)))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=3 * roundoff * np.abs(x).max())


def test_gpt_refuses_arguments():
  make_gpt(dim=6, positions="learned")  # odd heads that are not rotated
  for changes, match in [
    ({"dim": 15}, "dim=15 is not divisible by heads=2"),
    ({"dim": 6}, "heads of 3: positions='rope' rotates pairs"),
  ]:
    with pytest.raises(ValueError, match=match):
      make_gpt(**changes)


@pytest.mark.parametrize("tie_head", [True, False])
def test_the_head_has_a_module_path(tie_head):
  policy = {"base": "bf16", "overrides": {"GPT/head": "fp32"}}
  explained = functools.partial(mpjax.explain, lambda model, tokens: model(tokens), policy=policy)
  rows = explained(make_gpt(tie_head=tie_head), jnp.zeros((2, 4), jnp.int32)).rows
  products = [row for row in rows if row.flops]
  assert {row.path: row.after for row in products if row.path.endswith("head")} == {"GPT/head": "float32"}
  assert {row.after for row in products if not row.path.endswith("head")} == {"bfloat16"}


# Image models.


def test_image_models_refuse():
  for changes, shape, match in [
    ({"dim": 9}, (1, 4, 4, 1), "dim=9 is not divisible by heads=2"),
    ({"patch": 3}, (1, 4, 4, 1), r"images \[1, 4, 4, 1\]: .*patch=3"),
    ({}, (4, 4, 1), r"images \[4, 4, 1\]"),
  ]:
    vit = {"num_classes": 3, "patch": 2, "dim": 8, "layers": 1, "heads": 2}
    with pytest.raises(ValueError, match=match):
      jax.eval_shape(
        functools.partial(ViT(**(vit | changes)).init, train=False), jax.random.key(0), np.ones(shape)
      )


def test_resnet_statistics_move_by_a_tenth_only_while_training_and_stay_float32():
  variables = initialise(RESNET)
  apply = jax.jit(RESNET.apply, static_argnames=("train", "mutable"))
  for dtype in HALF:
    cast = {**variables, "params": cast_floating(variables["params"], dtype)}
    x = IMAGES.astype(jnp.dtype(dtype))
    shapes = functools.partial(RESNET.apply, train=True, mutable=["batch_stats"])
    logits, new = jax.eval_shape(shapes, cast, x)
    assert logits.dtype == dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(new)} == {"float32"}
  for train in (False, True):
    _, new = apply(variables, IMAGES, train=train, mutable=("batch_stats",))
    pairs = zip(*map(jax.tree.leaves, (variables["batch_stats"], new["batch_stats"])), strict=True)
    assert {bool(np.any(np.asarray(a) != b)) for a, b in pairs} == {train}
  kernel, padded = variables["params"]["stem"]["kernel"], np.pad(IMAGES[..., 0], ((0, 0), (1, 1), (1, 1)))
  windows = np.lib.stride_tricks.sliding_window_view(padded.astype(np.float64), (3, 3), axis=(1, 2))
  stem = np.einsum("bijhw,hwc->bijc", windows, np.asarray(kernel[:, :, 0], np.float64))
  mean = new["batch_stats"]["stem_norm"]["mean"]
  np.testing.assert_allclose(mean, 0.1 * stem.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
