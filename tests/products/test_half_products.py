"""Products of bfloat16 and float16 and their gradients are as exact as one rounding allows; products in passes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests.casting._jaxprs import equations
from tests.fp8._reference import lowered, normal, relative

pytestmark = pytest.mark.optimised  # rounding is what is tested

ROUNDING = {"bfloat16": 0.0017, "float16": 0.00022}  # of numbers of any size, relative, root mean square
X3, X4 = (4, 64, 64), (4, 8, 8, 64)


def einsum(formula):
  return lambda x, w: jnp.einsum(formula, x, w)


def conv(x, w):
  return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


SIZES = np.int32([96, 0, 128, 32])  # rows of each expert


def experts(x, w):
  return lax.ragged_dot(x, w, SIZES)


def experts_of_members(x, w):
  return jax.vmap(lax.ragged_dot)(x, w, np.stack([SIZES, SIZES[::-1]]))


def scanned(x, w):
  return lax.scan(lambda total, row: (total + row @ w, None), jnp.zeros((64, 96)), x)[0]


PRODUCTS = {  # the function, shapes of its operands
  "dense": (jnp.matmul, X3, (64, 96)),
  "attend to a tied embedding": (lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((), ()))), X3, (96, 64)),
  "attention scores": (einsum("bqhd,bkhd->bhqk"), (4, 64, 4, 32), (4, 48, 4, 32)),
  "output projection": (
    lambda x, w: lax.dot_general(x, w, (((2, 3), (0, 1)), ((), ()))), (4, 64, 4, 32), (4, 32, 96)),
  "sums in crossed order": (
    lambda x, w: lax.dot_general(x, w, (((2, 3), (1, 0)), ((), ()))), (4, 64, 4, 32), (32, 4, 96)),
  "experts": (experts, (256, 64), (4, 64, 96)),
  "vmap of experts": (experts_of_members, (2, 256, 64), (2, 4, 64, 96)),
  "checkpoint of experts": (jax.checkpoint(experts), (256, 64), (4, 64, 96)),
  "convolution": (conv, (4, 8, 8, 32), (3, 3, 32, 48)),
  "vmap of rows": (jax.vmap(jnp.matmul, (0, None)), X4, (64, 96)),
  "vmap of weights": (jax.vmap(jnp.matmul), X4, (4, 64, 96)),
  "scan": (scanned, X3, (64, 96)),
}  # fmt: skip


def operands(shapes, dtype):
  rng = np.random.default_rng(0)
  # Numbers that the compute dtype has, so that no cast rounds.
  return [rng.standard_normal(shape).astype(dtype).astype(np.float32) for shape in shapes]


def gradients(fun, x, w, ct):
  return jax.vjp(fun, x, w)[1](ct)


def in_order(order, fun, policy):
  if order == "grad(autocast)":
    return lambda x, w, ct: gradients(mpjax.autocast(fun, policy), x, w, ct)
  return mpjax.autocast(lambda *args: gradients(fun, *args), policy)


@pytest.mark.parametrize(
  ("order", "dtype"),
  [
    ("grad(autocast)", "bfloat16"),
    pytest.param("autocast(grad)", "bfloat16", marks=pytest.mark.slow),
    ("autocast(grad)", "float16"),
  ],
)
def test_gradients_are_rounded_once(order, dtype):
  policy, args = f"params=float32,compute={dtype},output=float32", {}
  for name, (fun, *shapes) in PRODUCTS.items():
    args[name] = operands((*shapes, jax.eval_shape(fun, *operands(shapes, dtype)).shape), dtype)

  @jax.jit
  def both(args):  # one program, which compiles faster than many
    of = lambda name: (
      in_order(order, PRODUCTS[name][0], policy),
      functools.partial(gradients, PRODUCTS[name][0]),
    )
    return {name: [f(*args[name]) for f in of(name)] for name in args}

  found = {name: jax.tree.map(relative, *pair) for name, pair in both(args).items()}
  # A scan adds four gradients, each rounded; nothing else rounds more than once.
  most = {name: (2 if name == "scan" else 1.1) * ROUNDING[dtype] for name in found}
  assert {name: errors for name, errors in found.items() if max(errors) > most[name]} == {}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_have_the_products_of_casts_by_hand(platform):
  dense = ("dense", "attend to a tied embedding", "attention scores", "vmap of weights")
  for name in (*dense, "experts", "vmap of experts"):
    fun, *shapes = PRODUCTS[name]
    x, w = (a.astype(jnp.bfloat16) for a in operands(shapes, "bfloat16"))
    ct = jax.eval_shape(fun, x, w)
    cast = mpjax.autocast(fun, "params=bfloat16,compute=bfloat16,output=bfloat16")
    by_hand, by_autocast = (
      products(jax.jit(functools.partial(gradients, f)).trace(x, w, ct).lower(lowering_platforms=(platform,)))
      for f in (fun, cast)
    )
    assert by_autocast == by_hand, name
    assert len(by_hand) == 2, name


@pytest.mark.parametrize(("platform", "result"), [("tpu", "f32"), ("cuda", "bf16")])
def test_other_platforms_convolve_in_half_precision_once_for_each_gradient(platform, result):
  """On a GPU a gradient is widened afterwards: cuDNN has no float32 result of half operands."""
  fun, *shapes = PRODUCTS["convolution"]
  args = operands((*shapes, (4, 8, 8, 48)), "bfloat16")
  for order in ("grad(autocast)", "autocast(grad)"):
    found = lowered(in_order(order, fun, "bf16"), *args, platform=platform)
    assert found == [("bf16", "bf16", result)] * 2, order


def products(lowered):
  """The products of a StableHLO module, without the names of values."""
  lines = [line for line in lowered.as_text().splitlines() if re.search("dot_general|ragged_dot", line)]
  return sorted(re.sub(r"%\w+", "", line).strip() for line in lines)


def test_policies_of_a_checkpoint_outside_save_products():
  loss = lambda x, w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
  x, w = operands(((8, 64), (64, 64)), "bfloat16")
  saved = jax.checkpoint(mpjax.autocast(loss, "bf16"), policy=jax.checkpoint_policies.dots_saveable)
  names = [e.primitive.name for e in equations(jax.grad(saved, (0, 1)), x, w)]
  assert names.count("dot_general") == 6  # two forward, and two for each of them backward


# Products of float32 operands in passes of bfloat16 or TensorFloat-32

A, B = normal(64, 96), normal(96, 32, seed=1)
NAMES = (
  "BF16_BF16_F32", "bfloat16_x3", "bfloat16_x6", "bfloat16_x9", "TF32_TF32_F32", "tensorfloat32_x3"
)  # fmt: skip


def under(name, fun=jnp.matmul):
  return mpjax.autocast(fun, {"base": "fp32", "matmul_precision": name})


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_computes_in_float32(name):
  both = lambda fun: (fun(A, B), *jax.vjp(fun, A, B)[1](jnp.ones((64, 32))), jax.vmap(fun, (0, None))(A, B))
  for run in (both, jax.jit(both, static_argnums=0)):
    for got, want in zip(run(under(name)), run(jnp.matmul), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_get_the_algorithm_itself(platform):
  def text(fun):
    exported = jax.export.export(jax.jit(fun), platforms=[platform])(A, B).mlir_module()
    return re.sub(r"loc\(.*?\)|#loc.*|@\S+", "", exported).split()

  def loss(x, y):
    return jnp.sum(jnp.tanh(x @ y))

  with jax.default_matmul_precision("BF16_BF16_F32_X3"):
    plain = [text(loss), text(jax.grad(loss))]
  assert "num_primitive_operations = 3" in " ".join(plain[0])
  assert [text(under("bfloat16_x3", loss)), text(jax.grad(under("bfloat16_x3", loss)))] == plain


@pytest.mark.parametrize(("base", "half"), [("bf16", jnp.bfloat16), ("fp16", jnp.float16)])
def test_products_in_half_precision_have_no_passes(base, half):
  policy = {"base": base, "matmul_precision": "bfloat16_x3"}

  def loss(x, y):
    return jnp.sum(jnp.tanh(x @ y)) + jnp.sum(mpjax.full_precision(jnp.matmul)(x, y))

  made = str(jax.make_jaxpr(jax.grad(mpjax.autocast(loss, policy)))(A, B))
  plain = str(jax.make_jaxpr(jax.grad(mpjax.autocast(loss, base)))(A, B))
  name = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[half]
  assert made.count(f"{name}[") == plain.count(f"{name}[") > 0
  assert made.count("precision=BF16_BF16_F32_X3") == 2  # the float32 product and its gradient
