"""The models: shapes, the dtype of every matrix product, attention against NumPy, dropout, BatchNorm."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import mpjax
from mpjax.dtypes import cast_floating
from mpjax.train.models import GPT, ResNet, ViT
from mpjax.train.models._gpt import dropout, rotate
from mpjax.train.models._vit import patches

HALF = {"bfloat16": 8e-3, "float16": 1e-3}  # twice the unit roundoff
VIT = ViT(num_classes=5, patch=2, dim=16, layers=1, heads=2)
RESNET = ResNet(num_classes=5, stages=(1, 1), width=4)


# The models, as functions of a parameter tree.


def make_gpt(**changes: Any) -> GPT:
  arguments = {
    "vocab_size": 17,
    "max_len": 8,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "rngs": nnx.Rngs(0),
  } | changes
  return GPT(**arguments)


@functools.cache
def gpt(**changes: Any) -> tuple[Callable[..., jax.Array], Any]:
  graphdef, params = nnx.split(make_gpt(**changes))
  return jax.jit(lambda params, *args, **kwargs: nnx.merge(graphdef, params)(*args, **kwargs)), params


def gpt_case(**changes: Any) -> tuple[Callable[..., jax.Array], Any]:
  model, params = gpt(**changes)
  return lambda params: model(params, jnp.arange(16).reshape(2, 8)), params


def image_case(module: Any) -> tuple[Callable[..., jax.Array], Any]:
  variables = initialise(module)
  rest = {name: tree for name, tree in variables.items() if name != "params"}

  def apply(params: Any) -> jax.Array:
    x = images().astype(jax.tree.leaves(params)[0].dtype)
    return module.apply({"params": params, **rest}, x, train=True, mutable=["batch_stats"])[0]

  return apply, variables["params"]


def images() -> jax.Array:
  return jax.random.normal(jax.random.key(1), (4, 4, 4, 1)) + 1


@functools.cache
def initialise(module: Any) -> Any:
  return jax.jit(lambda key: module.init(key, images(), train=False))(jax.random.key(0))


@functools.cache
def case(name: str) -> tuple[Callable[..., jax.Array], Any]:
  if name == "gpt":
    return gpt_case()
  if name == "gpt-learned-layer-untied":
    return gpt_case(positions="learned", norm="layer", tie_head=False)
  if name == "vit":
    return image_case(VIT)
  return image_case(RESNET)


SHAPES = {"gpt": (2, 8, 17), "gpt-learned-layer-untied": (2, 8, 17), "vit": (4, 5), "resnet": (4, 5)}


def scalar(apply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  return lambda params: jnp.square(apply(params).astype(jnp.float32)).mean()


# Dtypes.


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_gradients_and_every_product_have_the_dtype_of_the_parameters(name, dtype):
  apply, params = case(name)
  params = cast_floating(params, dtype)
  forward = jax.make_jaxpr(apply)(params)
  both = jax.make_jaxpr(jax.grad(scalar(apply)))(params)
  assert [(x.shape, x.dtype) for x in forward.out_avals] == [(SHAPES[name], dtype)]
  assert {x.dtype.name for x in both.out_avals} == {dtype}
  products, more = product_dtypes(forward.jaxpr), product_dtypes(both.jaxpr)
  assert set(products) == set(more) == {(dtype, dtype)}
  # A product has two gradients, but that of the images is not asked for.
  assert len(more) >= 3 * len(products) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_has_a_gradient_in_float16(name):
  apply, params = case(name)
  # BatchNorm scales that start at zero cut off what lies before them.
  params = jax.tree.map(lambda p: p if p.any() else p + 1, cast_floating(params, "float16"))
  for path, grad in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(scalar(apply)))(params)):
    assert np.isfinite(np.asarray(grad)).all(), path
    assert np.any(np.asarray(grad) != 0), path


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "bfloat16"), ("cuda", "float16")])
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_lowered_for_an_accelerator_has_half_operands(name, platform, dtype):
  apply, params = case(name)
  params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
  params = cast_floating(params, dtype)
  text = export.export(jax.jit(jax.grad(scalar(apply))), platforms=[platform])(params).mlir_module()
  operands = re.findall(
    r"stablehlo\.(?:dot_general|convolution)\b.*: \((tensor<.*?>), (tensor<.*?>)\) ->", text
  )
  short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
  assert len(operands) > 10
  assert all(side.endswith(f"x{short}>") for pair in operands for side in pair)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", SHAPES)
def test_half_logits_are_near_float32(name, dtype):
  apply, params = case(name)
  exact = float32_logits(name)
  half = np.asarray(jax.jit(apply)(cast_floating(params, dtype)), np.float32)
  np.testing.assert_allclose(half, exact, atol=8 * HALF[dtype] * np.abs(exact).max())


@functools.cache
def float32_logits(name: str) -> np.ndarray:
  apply, params = case(name)
  return np.asarray(jax.jit(apply)(params))


@pytest.mark.slow
def test_embedding_gradients_of_half_parameters_are_summed_in_float32():
  model, params = gpt(tie_head=False)
  tokens = jnp.zeros((128, 8), jnp.int32)  # one row is used 1024 times: a bfloat16 sum would stall
  grad = jax.jit(jax.grad(lambda params: model(params, tokens).astype(jnp.float32)[..., 0].sum()))

  half = cast_floating(params, jnp.bfloat16)
  got = np.asarray(grad(half)["embed"][...], np.float32)[0]
  want = np.asarray(grad(cast_floating(half, jnp.float32))["embed"][...])[0]
  np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


# GPT.


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_gpt_logits_do_not_depend_on_later_tokens(positions):
  model, params = gpt(positions=positions)
  tokens = jnp.arange(8)[None]
  before, after = model(params, tokens)[0], model(params, tokens.at[0, 5].set(16))[0]
  np.testing.assert_allclose(before[:5], after[:5], rtol=1e-5, atol=1e-6)
  assert (np.abs(before[5:] - after[5:]).max(-1) > 1e-5).all()


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_gpt_logits_depend_on_the_order_of_earlier_tokens(positions):
  model, params = gpt(positions=positions)
  forth, back = (model(params, jnp.array([tokens])) for tokens in ([1, 2, 3, 4], [2, 1, 3, 4]))
  assert np.abs(forth[0, -1] - back[0, -1]).max() > 1e-5


def test_gpt_parameters_are_its_whole_state():
  for changes in ({}, {"positions": "learned", "norm": "layer", "tie_head": False, "dropout": 0.1}):
    graphdef, params, rest = nnx.split(make_gpt(**changes), nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    assert {p.dtype.name for p in jax.tree.leaves(params)} == {"float32"}
    again = nnx.graphdef(nnx.eval_shape(lambda changes=changes: make_gpt(**changes)))
    assert graphdef == again
    assert hash(graphdef) == hash(again)


@pytest.mark.parametrize(
  ("changes", "matrices"),
  [({}, 1 + 4 * 3), ({"tie_head": False}, 2 + 4 * 3), ({"positions": "learned"}, 2 + 4 * 3)],
)
def test_gpt_has_the_matrices_that_it_should(changes, matrices):
  leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: make_gpt(layers=3, **changes))))
  assert sum(leaf.ndim == 2 for leaf in leaves) == matrices


@pytest.mark.slow
def test_gpt_starts_near_the_uniform_distribution():
  model, params = gpt(vocab_size=256, dim=64)
  logits = model(params, jnp.arange(8)[None])
  loss = -jax.nn.log_softmax(logits)[0, :-1][jnp.arange(7), jnp.arange(1, 8)].mean()
  assert abs(loss - np.log(256)) < 0.2


def test_gpt_dropout_needs_a_key_and_follows_it():
  tokens = jnp.arange(16).reshape(2, 8)
  model, params = gpt(dropout=0.5)
  plain, _ = gpt()
  one, two = jax.random.key(1), jax.random.key(2)
  np.testing.assert_array_equal(model(params, tokens), plain(params, tokens))
  np.testing.assert_array_equal(plain(params, tokens, rng=one), plain(params, tokens))
  np.testing.assert_array_equal(model(params, tokens, rng=one), model(params, tokens, rng=one))
  assert not np.array_equal(model(params, tokens, rng=one), model(params, tokens, rng=two))
  assert not np.array_equal(model(params, tokens, rng=one), model(params, tokens))


@pytest.mark.parametrize("dtype", HALF)
def test_gpt_dropout_keeps_the_dtype(dtype):
  model, params = gpt(dropout=0.5)
  traced = jax.eval_shape(model, cast_floating(params, dtype), jnp.zeros((2, 8), int), rng=jax.random.key(0))
  assert traced.dtype == dtype


def test_dropout_keeps_the_mean():
  x = jnp.ones(4096)
  y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
  assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
  assert abs(y.mean() - 1) < 0.05


def test_rotated_products_depend_on_the_distance_alone():
  length, size = 12, 8
  q, k = (jax.random.normal(jax.random.key(i), (size,)) for i in range(2))
  everywhere = lambda x: rotate(jnp.broadcast_to(x, (1, length, 1, size)))[0, :, 0]
  products = np.asarray(everywhere(q) @ everywhere(k).T)  # [T, T]
  for distance in range(-length + 1, length):
    diagonal = np.diagonal(products, distance)
    np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
  assert np.std(products[0]) > 0.1
  np.testing.assert_allclose(products[0, 0], q @ k, rtol=1e-5)


def test_rotation_turns_pairs_by_the_position_times_their_frequency():
  x = jax.random.normal(jax.random.key(0), (1, 5, 1, 6))
  pairs = np.asarray(x[..., :3]) + 1j * np.asarray(x[..., 3:])
  frequency = 10000.0 ** (-np.arange(3) / 3)
  want = pairs * np.exp(1j * np.arange(5)[:, None, None] * frequency)
  np.testing.assert_allclose(rotate(x), np.concatenate([want.real, want.imag], -1), rtol=1e-5, atol=1e-6)


def test_rotation_of_half_precision_has_float32_angles():
  x = jnp.ones((1, 2048, 1, 8))
  for dtype, roundoff in HALF.items():
    got = rotate(x.astype(dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), rotate(x), atol=2 * roundoff)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"dim": 15}, "dim=15 is not divisible by heads=2"),
    ({"dim": 6}, "heads of 3: positions='rope' rotates pairs"),
    ({"norm": "batch"}, "norm='batch': expected one of rms, layer"),
    ({"positions": "alibi"}, "positions='alibi': expected one of rope, learned"),
    ({"attention": "flash"}, "attention='flash': expected one of auto, xla, cudnn, splash"),
    ({"dropout": 1.0}, r"dropout=1.0: expected a rate"),
    ({"layers": 0}, "layers=0: expected a positive integer"),
    ({"vocab_size": -1}, "vocab_size=-1"),
  ],
)
def test_gpt_refuses_arguments(changes, match):
  with pytest.raises(ValueError, match=match):
    make_gpt(**changes)


@pytest.mark.parametrize("tie_head", [True, False])
def test_the_head_has_a_module_path(tie_head):
  model = make_gpt(tie_head=tie_head)
  explained = mpjax.explain(
    lambda model, tokens: model(tokens), {"base": "bf16", "overrides": {"GPT/head": "fp32"}}
  )
  products = [row for row in explained(model, jnp.zeros((2, 4), jnp.int32)).rows if row.flops]
  assert {row.path: row.after for row in products if row.path.endswith("head")} == {"GPT/head": "float32"}
  assert {row.after for row in products if not row.path.endswith("head")} == {"bfloat16"}


def test_gpt_takes_odd_heads_with_learned_positions():
  logits = jax.eval_shape(lambda: make_gpt(dim=6, positions="learned")(jnp.zeros((1, 2), int)))
  assert logits.shape == (1, 2, 17)


@pytest.mark.parametrize(
  ("tokens", "match"),
  [
    (jnp.zeros((1, 9), int), "a sequence of 9 tokens is longer than max_len=8"),
    (jnp.zeros((8,), int), r"tokens int32\[8\]: expected integers \[batch, length\]"),
    (jnp.zeros((1, 8)), r"tokens float32\[1, 8\]"),
  ],
)
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_gpt_refuses_tokens(positions, tokens, match):
  model, params = gpt(positions=positions)
  with pytest.raises(ValueError, match=match):
    model(params, tokens)


# Image models.


@pytest.mark.parametrize("shape", [(2, 8, 8, 1), (3, 12, 8, 3), (1, 2, 2, 1)])
@pytest.mark.parametrize(
  "module",
  [ViT(num_classes=7, patch=2, dim=8, layers=1, heads=2), ResNet(num_classes=7, width=4)],
  ids=["vit", "resnet"],
)
def test_image_models_take_any_size(module, shape):
  x = jnp.ones(shape)
  for train in (True, False):
    variables, logits = jax.eval_shape(
      lambda key, train=train: (
        variables := module.init(key, x, train=False),
        module.apply(variables, x, train, mutable=["batch_stats"])[0],
      ),
      jax.random.key(0),
    )
    assert (logits.shape, logits.dtype) == ((shape[0], 7), "float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}


@pytest.mark.parametrize(
  ("module", "shape", "match"),
  [
    ({"dim": 9}, (1, 4, 4, 1), "dim=9 is not divisible by heads=2"),
    ({"attention": "flash"}, (1, 4, 4, 1), "attention='flash'"),
    ({"patch": 3}, (1, 4, 4, 1), r"images \[1, 4, 4, 1\]: .*patch=3"),
    ({}, (4, 4, 1), r"images \[4, 4, 1\]"),
    (None, (4, 4, 1), r"images \[4, 4, 1\]"),
  ],
)
def test_image_models_refuse(module, shape, match):
  vit = {"num_classes": 3, "patch": 2, "dim": 8, "layers": 1, "heads": 2}
  model = ResNet(num_classes=3) if module is None else ViT(**(vit | module))
  with pytest.raises(ValueError, match=match):
    model.init(jax.random.key(0), jnp.ones(shape), train=False)


def test_vit_cuts_images_into_squares():
  image = np.arange(4 * 6 * 2).reshape(1, 4, 6, 2)
  want = [image[0, r : r + 2, c : c + 2].ravel() for r in (0, 2) for c in (0, 2, 4)]
  np.testing.assert_array_equal(patches(jnp.asarray(image), 2)[0], want)


def test_vit_dropout_only_while_training_and_follows_the_key():
  variables = initialise(VIT)
  apply = jax.jit(VIT.clone(dropout=0.5).apply, static_argnums=2)
  run = lambda train, seed: apply(variables, images(), train, rngs={"dropout": jax.random.key(seed)})
  np.testing.assert_array_equal(run(False, 1), run(False, 2))
  np.testing.assert_array_equal(run(True, 1), run(True, 1))
  assert not np.allclose(run(True, 1), run(True, 2))


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_resnet_statistics_move_only_while_training_and_stay_float32(dtype):
  variables = initialise(RESNET)
  before = jax.tree.leaves(variables["batch_stats"])
  variables = {**variables, "params": cast_floating(variables["params"], dtype)}
  apply = jax.jit(
    lambda x, train: RESNET.apply(variables, x, train, mutable=["batch_stats"]), static_argnums=1
  )
  for train in (False, True):
    logits, new = apply(images().astype(dtype), train)
    after = jax.tree.leaves(new)
    assert logits.dtype == dtype
    assert {leaf.dtype.name for leaf in after} == {"float32"}
    assert {bool((a != b).any()) for a, b in zip(before, after, strict=True)} == {train}


def test_resnet_moves_its_mean_by_a_tenth_of_the_way():
  variables = initialise(RESNET)
  stem = jax.lax.conv_general_dilated(
    images(),
    variables["params"]["stem"]["kernel"],
    (1, 1),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  want = 0.1 * np.asarray(stem, np.float64).mean((0, 1, 2))
  _, new = jax.jit(lambda x: RESNET.apply(variables, x, train=True, mutable=["batch_stats"]))(images())
  np.testing.assert_allclose(new["batch_stats"]["stem_norm"]["mean"], want, rtol=1e-4, atol=1e-6)


def product_dtypes(jaxpr: Any) -> list[tuple[str, ...]]:
  """Operand dtypes of each matrix product and convolution, through every nested jaxpr."""
  return [
    tuple(v.aval.dtype.name for v in eqn.invars[:2])
    for eqn in equations(jaxpr)
    if eqn.primitive.name in ("dot_general", "conv_general_dilated")
  ]


def equations(jaxpr: Any) -> Iterator[Any]:
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner)
