"""Kernels, those of a user and those that JAX ships: half precision by a line, a warning without it."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import mpjax
from mpjax.zoo.models import GPT
from tests.casting import _kernel
from tests.casting._conformance import normal
from tests.casting._jaxprs import equations, jit
from tests.casting._kernel import ORDERS, near

with warnings.catch_warnings():
  warnings.simplefilter("ignore", DeprecationWarning)  # in JAX 0.12 they are on their way to another package
  from jax.experimental.pallas.ops.gpu import attention as gpu_attention

half = mpjax.half_precision
LENGTH, HEADS, SIZE = 256, 2, 128
X = normal(1, LENGTH, HEADS * SIZE)
W = {name: normal(HEADS * SIZE, HEADS * SIZE, seed=i, scale=1 / 16) for i, name in enumerate("qkvo", 1)}
ones = functools.partial(np.ones, dtype=np.float32)


def kernels(fun, *args):
  """Returns the dtypes of the floating operands of each kernel in a function."""
  found = [e for e in equations(fun, *args) if e.primitive.name == "pallas_call"]
  return [[v.aval.dtype.name for v in e.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)] for e in found]


def kernel_rows(fun, *args, policy="bf16"):
  return [row for row in mpjax.explain(fun, *args, policy=policy).rows if row.operands]


# A user's kernel with a rule, which takes any dtype.


def mix_kernel(a_ref, b_ref, o_ref):
  o_ref[...] = jnp.tanh(a_ref[...]) * b_ref[...]


def mixed(a, b):
  like = jax.ShapeDtypeStruct(a.shape, a.dtype)
  return pl.pallas_call(mix_kernel, like, name="mix_forward", interpret=True)(a, b)


mix = jax.custom_vjp(mixed)
mix.defvjp(lambda a, b: (mixed(a, b), (a, b)), lambda kept, ct: (mixed(kept[0], ct), mixed(kept[1], ct)))
OWN = _kernel.loss_with(mix)


def test_a_kernel_in_float32_is_warned_of_with_the_line_that_changes_it():
  message = "mix_forward runs in float32.*module.function = mpjax.half_precision"
  with pytest.warns(mpjax.PrecisionWarning, match=message) as caught:
    jax.eval_shape(mpjax.autocast(OWN, "bf16"), _kernel.W, _kernel.X)
  assert [w.filename for w in caught] == [__file__] or sys.version_info < (3, 12)
  for order in ("grad of autocast", "autocast of grad"):
    with pytest.warns(mpjax.PrecisionWarning, match=message):
      jax.eval_shape(ORDERS[order](OWN, "bf16"), _kernel.W, _kernel.X)
  [row] = kernel_rows(OWN, _kernel.W, _kernel.X)
  assert row.operands == ("float32",)
  assert "mpjax.half_precision" in row.why
  explained = lambda loss, policy: mpjax.explain(loss, _kernel.W, _kernel.X, policy=policy)
  assert "mpjax.half_precision" in str(explained(OWN, "bf16"))
  assert "mpjax.half_precision" not in str(explained(OWN, "fp32"))
  beside = explained(_kernel.loss_with(lambda a, b: half(mix)(a, b) + mix(a, b)), "bf16")
  assert [row.operands for row in beside.rows if row.operands] == [("bfloat16",), ("float32",)]


def dequantised(codes, scale):
  def kernel(codes, scale, out):
    out[...] = codes[...].astype(jnp.float32) * scale[...]

  return pl.pallas_call(kernel, jax.ShapeDtypeStruct(codes.shape, scale.dtype))(codes, scale)


@pytest.mark.parametrize(
  ("fun", "policy", "args"),
  [
    (jax.grad(_kernel.loss_with(mpjax.full_precision(mix))), "bf16", (_kernel.W, _kernel.X)),
    (jax.grad(_kernel.loss_with(half(mix))), "bf16", (_kernel.W, _kernel.X)),
    (jax.grad(OWN), "fp32", (_kernel.W, _kernel.X)),
    (dequantised, "bf16", (np.ones((8, 8), np.int8), ones((8, 8)))),
  ],
  ids=["full precision", "half precision", "fp32", "quantised operands and their scales"],
)
def test_nothing_is_said_where_it_is_meant(fun, policy, args):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.eval_shape(mpjax.autocast(fun, policy), *args)


# Attention of libraries.


def loss_with(attend):
  """A loss of one layer of attention; `attend` takes [B, T, N, H]."""

  def loss(w, x):
    q, k, v = ((x @ w[name]).reshape(1, LENGTH, HEADS, SIZE) for name in "qkv")
    return 1000 * jnp.mean((attend(q, k, v).reshape(x.shape) @ w["o"]) ** 2)

  return loss


def by_heads(f):
  """Turns [B, T, N, H] into [B, N, T, H] for a kernel, and back."""
  return lambda q, k, v: f(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)


def splash(q, k, v):
  mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((LENGTH, LENGTH))] * HEADS)
  kernel = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
  return jax.vmap(half(kernel))(q / SIZE**0.5, k, v)


def on_gpu(q, k, v):
  names = ("block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  options = {"block_sizes": gpu_attention.BlockSizes(**dict.fromkeys(names, 64)), "interpret": True}
  return half(gpu_attention.mha)(q, k, v, segment_ids=None, causal=True, **options)


LOSSES = {
  "flash attention for TPU": loss_with(
    by_heads(lambda q, k, v: half(flash_attention.flash_attention)(q, k, v, causal=True))
  ),
  "splash attention for TPU": loss_with(by_heads(splash)),
  "attention for GPU": loss_with(on_gpu),
}


@pytest.mark.parametrize("name", LOSSES)
def test_attention(name):
  fp8 = {"base": "fp8", "fp8": {"emulate": True}}
  of_checkpoint = lambda f, policy: jax.grad(mpjax.autocast(jax.checkpoint(f), policy))
  for order, policy, dtype in (
    (ORDERS["grad of autocast"], "bf16", "bfloat16"),
    (ORDERS["autocast of grad"], "fp16", "float16"),
    (of_checkpoint, fp8, "bfloat16"),
  ):
    found = kernels(order(LOSSES[name], policy), W, X)
    assert len(found) >= 3
    # What a kernel keeps of its softmax is float32 in half precision, too.
    assert all(dtype in dtypes and dtypes.count("float32") <= 3 for dtypes in found), (policy, found)
  assert {dtype for dtypes in kernels(jax.grad(LOSSES[name]), W, X) for dtype in dtypes} == {"float32"}
  rows = kernel_rows(jax.grad(LOSSES[name]), W, X)
  assert [row.after for row in rows] == ["bfloat16"] * 3


def test_its_gradients():
  f = LOSSES["attention for GPU"]
  near(*jit(lambda w, x: (jax.grad(mpjax.autocast(f, "bf16"))(w, x), jax.grad(f)(w, x)))(W, X), 0.1)


def refuses_float32(query, key, value, *args, mask_type=MaskType.NO_MASK, **kwargs):
  if query.dtype == jnp.float32:
    raise ValueError("query must be fp16 or bf16")
  scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
  if mask_type == MaskType.CAUSAL:
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)
  return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


def test_cudnns_attention_is_no_longer_refused(monkeypatch):
  monkeypatch.setattr(jax._src.nn.functions, "cudnn_dot_product_attention", refuses_float32)
  attend = lambda how: loss_with(functools.partial(half(jax.nn.dot_product_attention), implementation=how))
  with pytest.raises(ValueError, match="must be fp16 or bf16"):
    jax.eval_shape(attend("cudnn"), W, X)
  functions = [ORDERS[order](attend("cudnn"), "bf16") for order in ("grad of autocast", "autocast of grad")]
  found, want = jit(lambda w, x: ([f(w, x) for f in functions], jax.grad(attend("xla"))(w, x)))(W, X)
  for one in found:
    near(one, want)
  model = functools.partial(GPT, vocab_size=16, max_len=8, dim=16, layers=2, heads=2)
  fused, plain = (model(attention=name, rngs=nnx.Rngs(0)) for name in ("cudnn", "xla"))
  loss = lambda model: jnp.mean(jax.nn.log_softmax(model(np.arange(16).reshape(2, 8)))[..., 0])
  near(nnx.jit(nnx.grad(mpjax.autocast(loss, "bf16")))(fused), nnx.jit(nnx.grad(loss))(plain), 0.1)
