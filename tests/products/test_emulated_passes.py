"""Products of float32 operands in passes of bfloat16 or TensorFloat-32: their error, and who computes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.tuning import tune

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 32)))
# Bits of the mantissa, parts of an operand, products of parts; the range of the relative error.
ALGORITHMS = {
  "BF16_BF16_F32": (7, 1, 1, 1e-3, 5e-3),
  "bfloat16_x3": (7, 2, 3, 3e-6, 3e-5),
  "bfloat16_x6": (7, 3, 6, 0, 4e-7),
  "bfloat16_x9": (7, 3, 9, 0, 4e-7),
  "TF32_TF32_F32": (10, 1, 1, 1e-4, 6e-4),
  "tensorfloat32_x3": (10, 2, 3, 0, 6e-7),
}


def under(name, fun=jnp.matmul):
  return mpjax.autocast(fun, {"base": "fp32", "matmul_precision": name})


def in_float64(x, y):
  return np.asarray(x, np.float64) @ np.asarray(y, np.float64)


def error(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def parts(x, bits, count):
  """Returns float64 parts: cut to the bits of a mantissa, the last one rounded to them."""
  out, rest = [], np.asarray(x, np.float64)
  for i in range(count):
    mantissa, exponent = np.frexp(rest)
    whole = np.ldexp(mantissa, bits + 1)
    out.append(np.ldexp(np.rint(whole) if i == count - 1 else np.trunc(whole), exponent - bits - 1))
    rest = rest - out[-1]
  return out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_product_in_passes_is_the_sum_of_the_products_of_leading_parts(name):
  bits, count, products, least, most = ALGORITHMS[name]
  xs, ys = parts(A, bits, count), parts(B, bits, count)
  pairs = sorted(((i, j) for i in range(count) for j in range(count)), key=sum)[:products]
  want = sum(xs[i] @ ys[j] for i, j in pairs)
  for got in (under(name)(A, B), jax.jit(under(name))(A, B), jax.vmap(under(name), (0, None))(A[:, None], B)):
    assert error(np.reshape(got, want.shape), want) < 5e-7
    assert least < error(np.reshape(got, want.shape), in_float64(A, B)) < most


@pytest.mark.parametrize("name", ["bfloat16_x3", "tensorfloat32_x3"])
def test_gradients_are_products_in_passes(name):
  *_, least, most = ALGORITHMS[name]
  ct = RNG.standard_normal((64, 32)).astype(np.float32)
  wants = in_float64(ct, B.T), in_float64(A.T, ct)
  for grads in (jax.vjp(under(name), A, B)[1](ct), jax.jit(lambda: jax.vjp(under(name), A, B)[1](ct))()):
    for grad, want in zip(grads, wants, strict=True):
      assert least < error(grad, want) < most


def test_an_infinity_stays_one():
  x = np.array([[np.inf, 1.0], [1.0, 2.0]], np.float32)
  for name in ALGORITHMS:
    np.testing.assert_array_equal(under(name)(x, np.ones((2, 1), np.float32)), [[np.inf], [3.0]])


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


def test_steps_tools_and_tune_see_the_error():
  params = {"w": jnp.asarray(B)}
  batch = {"x": jnp.asarray(A), "y": jnp.asarray(RNG.standard_normal((64, 32)), jnp.float32)}

  def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

  policies = [{"base": "fp32", "matmul_precision": f"bfloat16_x{n}"} for n in (3, 6)]
  moved = []
  for policy in ("fp32", *policies):
    step = mpjax.make_train_step(loss_fn, optax.sgd(1.0), policy)
    moved.append(step(step.init(params), batch)[0].params["w"] - B)
  errors = [error(one, np.asarray(moved[0], np.float64)) for one in moved[1:]]
  assert 1e-6 < errors[0] < 1e-4
  assert errors[1] < errors[0] / 10
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy=policies[0])
  assert max(tensor.error for tensor in report.tensors if tensor.error is not None) > 1e-7
  result = tune(loss_fn, params, [batch, batch], tolerance=1e-3, candidates=policies)
  assert [0 < trial.error.gradient < 1e-4 for trial in result.trials] == [True, True]
