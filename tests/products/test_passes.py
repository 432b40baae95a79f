"""Products of float32 operands in passes of bfloat16 or TensorFloat-32: the programs for each platform."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 32)))
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
