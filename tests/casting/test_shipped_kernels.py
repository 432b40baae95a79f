"""Kernels that JAX and tokamax ship run in half precision under autocast by a line of the user's."""

import functools
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention, paged_attention, ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import mpjax
from mpjax.zoo.models import GPT
from tests.casting._conformance import normal
from tests.casting._jaxprs import equations, jit
from tests.casting._kernel import near

with warnings.catch_warnings():
  warnings.simplefilter("ignore", DeprecationWarning)  # in JAX 0.12 they are on their way to another package
  from jax.experimental.pallas.ops.gpu import attention as gpu_attention, layer_norm, rms_norm

half = mpjax.half_precision
LENGTH, HEADS, SIZE = 256, 2, 128
X = normal(1, LENGTH, HEADS * SIZE)
W = {name: normal(HEADS * SIZE, HEADS * SIZE, seed=i, scale=1 / 16) for i, name in enumerate("qkvo", 1)}
ones = functools.partial(np.ones, dtype=np.float32)


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


BLOCKS = gpu_attention.BlockSizes(
  block_q=64, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
)
on_gpu = functools.partial(
  half(gpu_attention.mha), segment_ids=None, causal=True, interpret=True, block_sizes=BLOCKS
)
LOSSES = {
  "flash attention for TPU": loss_with(
    by_heads(lambda q, k, v: half(flash_attention.flash_attention)(q, k, v, causal=True))
  ),
  "splash attention for TPU": loss_with(by_heads(splash)),
  "attention for GPU": loss_with(on_gpu),
}
ORDERS = {
  "grad of autocast": lambda f, policy: jax.grad(mpjax.autocast(f, policy)),
  "autocast of grad": lambda f, policy: mpjax.autocast(jax.grad(f), policy),
  "checkpoint": lambda f, policy: jax.grad(mpjax.autocast(jax.checkpoint(f), policy)),
}


def kernels(fun, *args):
  """Returns the dtypes of the operands of each kernel in a function."""
  found = [e for e in equations(fun, *args) if e.primitive.name == "pallas_call"]
  return [[v.aval.dtype for v in e.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)] for e in found]


@pytest.mark.parametrize("name", LOSSES)
def test_attention(name):
  fp8 = {"base": "fp8", "fp8": {"emulate": True}}
  for order, policy, half in zip(
    ORDERS, ("bf16", "fp16", fp8), ("bfloat16", "float16", "bfloat16"), strict=True
  ):
    found = kernels(ORDERS[order](LOSSES[name], policy), W, X)
    assert len(found) >= 3, order
    # What a kernel keeps of its softmax is float32 in half precision, too.
    assert all(half in dtypes and dtypes.count("float32") <= 3 for dtypes in found), (order, found)
  plain = kernels(jax.grad(LOSSES[name]), W, X)
  assert {dtype for dtypes in plain for dtype in dtypes} == {jnp.dtype("float32")}


def test_its_gradients():
  f = LOSSES["attention for GPU"]
  near(*jit(lambda w, x: (jax.grad(mpjax.autocast(f, "bf16"))(w, x), jax.grad(f)(w, x)))(W, X), 0.1)


@pytest.mark.parametrize("norm", [rms_norm.rms_norm, layer_norm.layer_norm], ids=["rms_norm", "layer_norm"])
def test_norms(norm):
  def loss(w, x):
    return jnp.sum(
      half(norm)(x @ w["q"], ones(HEADS * SIZE), 0 * ones(HEADS * SIZE), interpret=True) @ w["o"]
    )

  [dtypes] = kernels(mpjax.autocast(loss, "bf16"), W, X)
  assert set(dtypes) == {jnp.dtype("bfloat16")}


def test_paged_attention():
  q, pages = ones((1, 2, 128)), ones((2, 4, 16, 128))

  def attend(q, pages):
    lengths, indices = np.ones(1, np.int32), np.zeros((1, 4), np.int32)
    return half(paged_attention.paged_attention)(q, pages, pages, lengths, indices, pages_per_compute_block=4)

  [dtypes] = kernels(mpjax.autocast(attend, "bf16"), q, pages)
  assert dtypes.count("bfloat16") >= 2  # the kernel widens queries itself


def test_ragged_paged_attention():
  def attend(q, pages):
    whole = functools.partial(np.full, dtype=np.int32)
    return half(ragged_paged_attention.ragged_paged_attention)(
      q, pages, whole(2, 16), whole((2, 4), 0), np.array([0, 8, 16], np.int32), whole(1, 2),
      num_kv_pages_per_block=2, num_queries_per_block=8,
    )  # fmt: skip

  [dtypes] = kernels(mpjax.autocast(attend, "bf16"), ones((16, 4, 128)), ones((8, 16, 4, 128)))
  assert set(dtypes) == {jnp.dtype("bfloat16")}


FUSED = half(jax.nn.dot_product_attention)


def refuses_float32(query, key, value, *args, mask_type=MaskType.NO_MASK, **kwargs):
  if query.dtype == jnp.float32:
    raise ValueError("query must be fp16 or bf16")
  scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
  if mask_type == MaskType.CAUSAL:
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)
  return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


def test_cudnns_attention_is_no_longer_refused(monkeypatch):
  monkeypatch.setattr(jax._src.nn.functions, "cudnn_dot_product_attention", refuses_float32)
  loss, plain = (loss_with(functools.partial(FUSED, implementation=how)) for how in ("cudnn", "xla"))
  with pytest.raises(ValueError, match="must be fp16 or bf16"):
    jax.eval_shape(loss, W, X)
  functions = [order(loss, "bf16") for order in ORDERS.values()] + [ORDERS["grad of autocast"](loss, "fp16")]
  found, want = jit(lambda w, x: ([f(w, x) for f in functions], jax.grad(plain)(w, x)))(W, X)
  for one in found:
    near(one, want, 0.03)


def test_the_built_in_models_take_it(monkeypatch):
  monkeypatch.setattr(jax._src.nn.functions, "cudnn_dot_product_attention", refuses_float32)
  model = functools.partial(GPT, vocab_size=16, max_len=8, dim=16, layers=2, heads=2)
  fused, plain = (model(attention=name, rngs=nnx.Rngs(0)) for name in ("cudnn", "xla"))
  loss = lambda model: jnp.mean(jax.nn.log_softmax(model(np.arange(16).reshape(2, 8)))[..., 0])
  near(nnx.jit(nnx.grad(mpjax.autocast(loss, "bf16")))(fused), nnx.jit(nnx.grad(loss))(plain), 0.1)


def test_without_the_line_autocast_and_explain_say_it():
  attend = by_heads(lambda q, k, v: flash_attention.flash_attention(q, k, v, causal=True))
  line = "flash_attention = mpjax.half_precision(flash_attention)"
  for order in ORDERS.values():
    with pytest.warns(mpjax.PrecisionWarning, match=re.escape(line)):
      found = kernels(order(loss_with(attend), "bf16"), W, X)
    assert {dtype for dtypes in found for dtype in dtypes} == {jnp.dtype("float32")}
  explained = mpjax.explain(jax.grad(loss_with(attend)), W, X, policy="bf16")
  rows = [row for row in explained.rows if row.operands]
  assert len(rows) == 3
  assert all(line in row.why for row in rows)


def test_autocast_sets_no_attribute_of_a_library():
  program = """
import jax, mpjax
from jax.experimental.pallas.ops.tpu import flash_attention
held = [m for name, m in sys.modules.items() if name.partition(".")[0] == "jax"]
before = [(m, dict(vars(m))) for m in held]
classes = [type(x) for _, own in before for x in own.values()]
jax.eval_shape(mpjax.autocast(lambda x: x @ x, "bf16"), jax.ShapeDtypeStruct((4, 4), "float32"))
for m, own in before:
  changed = [name for name, x in own.items() if vars(m).get(name) is not x]
  assert not changed, (m, changed)
assert classes == [type(x) for _, own in before for x in own.values()]
"""
  done = subprocess.run([sys.executable, "-W", "ignore", "-c", "import sys" + program], check=False)
  assert done.returncode == 0


def test_explain_shows_each_kernel_and_its_dtypes():
  f = LOSSES["flash attention for TPU"]
  explained = mpjax.explain(jax.grad(f), W, X, policy="bf16")
  rows = [row for row in explained.rows if row.operands]
  assert len(rows) == 3
  assert {row.after for row in rows} == {"bfloat16"}
  assert sum(row.flops for row in rows) > 0
  assert "pallas_call" in explained.table("kernels")


def test_explain_counts_products_in_a_region():
  region = mpjax.half_precision(jax.jit(lambda x, w: jnp.tanh(x @ w) @ w))
  explained = mpjax.explain(lambda x, w: region(x, w) @ w, ones((8, 4)), ones((4, 4)), policy="bf16")
  assert explained.matrix_flops() == {"bfloat16": 3 * 2 * 8 * 4 * 4}


def test_explain_warns_of_kernels_in_float32():
  def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  def f(x, region=lambda f: f):
    call = lambda x: pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    return region(call)(x @ x) + call(x)

  explain = lambda f, policy: mpjax.explain(f, ones((8, 8)), policy=policy)
  rows = [row for row in explain(f, "bf16").rows if row.operands]
  assert [row.operands for row in rows] == [("float32",)] * 2
  assert all("mpjax.half_precision" in row.why for row in rows)
  assert "mpjax.half_precision" in str(explain(f, "bf16"))
  wrapped = functools.partial(f, region=mpjax.half_precision)
  found = [row.operands for row in explain(wrapped, "bf16").rows if row.operands]
  assert found == [("bfloat16",), ("float32",)]
  assert "mpjax.half_precision" not in str(explain(f, "fp32"))


TOKAMAX = {
  "attention": lambda tokamax: loss_with(
    functools.partial(half(tokamax.dot_product_attention), is_causal=True, implementation="xla")
  ),
  "gated linear unit": lambda tokamax: (
    lambda w, x: jnp.mean(
      half(tokamax.gated_linear_unit)(
        x, jnp.stack([w["q"], w["k"]], 1), activation=jax.nn.silu, implementation="xla"
      )
      @ w["o"]
    )
  ),
}


@pytest.mark.parametrize("name", TOKAMAX)
def test_functions_of_tokamax(name):
  tokamax = pytest.importorskip("tokamax", exc_type=ImportError)
  plain = jax.grad(TOKAMAX[name](tokamax))
  jax.eval_shape(mpjax.autocast(lambda x: x, "bf16"), X)
  loss = TOKAMAX[name](tokamax)
  forward = [e for e in equations(mpjax.autocast(loss, "bf16"), W, X) if e.primitive.name == "dot_general"]
  assert len(forward) >= 2
  assert {v.aval.dtype.name for e in forward for v in e.invars[:1]} == {"bfloat16"}
  functions = [order(loss, "bf16") for order in ORDERS.values()]
  found, want = jit(lambda w, x: ([f(w, x) for f in functions], plain(w, x)))(W, X)
  for one in found:
    near(one, want, 0.05)


def cudnn_is_here() -> bool:
  q = jax.ShapeDtypeStruct((1, LENGTH, HEADS, SIZE), jnp.bfloat16)
  try:
    jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q)
  except RuntimeError:  # it is not detected
    return False
  return True


@pytest.mark.skipif(not cudnn_is_here(), reason="JAX finds no cuDNN: install nvidia-cudnn-cu13")
@pytest.mark.parametrize(("policy", "half"), [("bf16", "bf16"), ("fp16", "f16")])
@pytest.mark.parametrize("order", ORDERS)
def test_cudnns_attention_in_a_program_for_gpus(order, policy, half):
  loss = loss_with(functools.partial(FUSED, implementation="cudnn"))
  text = jax.jit(ORDERS[order](loss, policy)).trace(W, X).lower(lowering_platforms=("cuda",)).as_text()
  calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
  assert any("Backward" in line for line in calls)
  for line in calls:
    operands = line.rpartition(" : ")[2].partition("->")[0]
    assert operands.count(f"x{half}>") >= 3, line
  rows = [row for row in mpjax.explain(jax.grad(loss), W, X, policy=policy).rows if row.operands]
  assert len(rows) == 2
  assert {row.after for row in rows} == {"bfloat16" if half == "bf16" else "float16"}
