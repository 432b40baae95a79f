"""A decoder whose attention is a kernel in a region: its operands are half precision, and so `explain` says."""

from __future__ import annotations

import warnings

import jax
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import mpjax
from tests.casting._jaxprs import bodies, is_matrix_product, multiplied
from tests.models._flax import decoder

with warnings.catch_warnings():
  warnings.simplefilter("ignore", DeprecationWarning)  # in JAX 0.12 they are on their way to another package
  from jax.experimental.pallas.ops.gpu import attention as gpu_attention

half = mpjax.half_precision
LENGTH, HEADS = 128, 4


def by_heads(f):
  """Turns [B, T, N, H] into [B, N, T, H] for a kernel, and back."""
  return lambda q, k, v, **rest: f(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)


def flash(q, k, v):
  return half(flash_attention.flash_attention)(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5)


def splash(q, k, v):
  mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((LENGTH, LENGTH))] * HEADS)
  kernel = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
  return jax.vmap(half(kernel))(q * q.shape[-1] ** -0.5, k, v)


def on_gpu(q, k, v, **rest):
  names = ("block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  sizes = gpu_attention.BlockSizes(**dict.fromkeys(names, 64))
  options = {"segment_ids": None, "causal": True, "interpret": True, "block_sizes": sizes}
  return half(gpu_attention.mha)(q, k, v, sm_scale=q.shape[-1] ** -0.5, **options)


def fused(q, k, v, **rest):
  return jax.nn.dot_product_attention(q, k, v, is_causal=True)


# With how many kernels each has, forward and backward.
ATTENTION = {
  "flash attention for TPU": (by_heads(flash), 3),
  "splash attention for TPU": (by_heads(splash), 3),
  "attention for GPU": (on_gpu, 3),
  "jax.nn.dot_product_attention": (fused, 0),
}


def outside(jaxpr):
  """Yields the equations at any depth, but for those inside kernels."""
  for equation in jaxpr.eqns:
    yield equation
    if equation.primitive.name != "pallas_call":
      for body in bodies(equation):
        yield from outside(body)


@pytest.mark.parametrize(
  ("name", "policy"), [*((name, "bf16") for name in ATTENTION), ("attention for GPU", "fp16")]
)
def test_a_kernel_in_a_decoder_has_half_precision_operands(name, policy):
  of = decoder(LENGTH, 512, attention_fn=ATTENTION[name][0])
  narrow = {"bf16": "bfloat16", "fp16": "float16"}[policy]
  args = (of.params, of.batch, jax.random.key(0))
  explained = mpjax.explain(jax.value_and_grad(of.loss), *args, policy=policy)
  kernels = [row for row in explained.rows if row.operands]
  assert len(kernels) == ATTENTION[name][1]
  assert {row.after for row in kernels} <= {narrow}
  assert ("kernels" in explained.tables) == bool(kernels)
  assert {row.after for row in explained.rows if row.flops and row.list == "allow"} == {narrow}
  equations = list(outside(jax.make_jaxpr(jax.grad(mpjax.autocast(of.loss, policy)))(*args).jaxpr))
  inputs = [[str(v.aval.dtype) for v in e.invars] for e in equations if e.primitive.name == "pallas_call"]
  assert len(inputs) == len(kernels)
  assert all(dtypes.count(narrow) >= 2 for dtypes in inputs)
  short = {"bf16": "bf16 bf16", "fp16": "f16 f16"}[policy]
  assert {multiplied(e) for e in equations if is_matrix_product(e)} == {short}
