"""Attention: plain matrix products, or JAX's fused kernels, cuDNN's on a GPU and splash on a TPU.

Products, forward and backward, take operands in the dtype of the inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from mpjax._types import Array
from mpjax.casting import as_its_module

if TYPE_CHECKING:  # models do not need the packages that read data
  from mpjax.registry import ModelInfo

_SHORTEST = 1024  # below this, splash needs more memory than the scores (TPU v5e)
_LANES = 128


def chosen_attention(asked: str, info: ModelInfo, *, heads: int, head_dim: int, length: int) -> str:
  """Chooses the implementation of attention for a run: `xla`, `cudnn` or `splash`.

  `auto` chooses a fused kernel if one supports the platform, the policy's compute dtype and rows of `length`
  positions, and `xla` otherwise.
  """
  if asked == "xla":
    return "xla"
  shape, half = (1, length, heads, head_dim), info.policy.compute_dtype
  if info.backend == "gpu" and _cudnn_is_here(shape, half):
    return "cudnn"
  fits = info.backend == "tpu" and length >= _SHORTEST and _takes("splash", shape, half)
  return "splash" if fits else "xla"


def split_heads(qkv: Array, heads: int) -> list[Array]:
  """Returns queries, keys and values: [B, T, 3 D] with columns by head -> three of [B, T, N, H].

  The columns are q, k and v of the first head, then of the second, and so on. A device that holds a part of
  the columns has q, k and v of the same heads, and no data moves.
  """
  each = qkv.reshape(*qkv.shape[:-1], heads, 3, -1)
  return [each[..., i, :] for i in range(3)]


def attention(q: Array, k: Array, v: Array, *, causal: bool, implementation: str = "auto") -> Array:
  """Returns `softmax(q k^T / sqrt(H)) v` for each head: three of [B, T, N, H] and one dtype to the same.

  On the XLA path softmax and its gradient are float32. Matrix products take operands in the inputs' dtype
  and accumulate in float32. Only `q`, `k` and `v` are kept for the backward pass, which computes the
  probabilities again. There is only a reverse-mode rule (no `jax.jvp`).

  With `causal`, position t sees positions 0 to t only. `implementation` is `xla` (`auto`), or a fused kernel:
  `cudnn` (half precision on NVIDIA GPUs) or `splash` (bfloat16 on TPUs). Under autocast the module's dtype
  counts. Kernels fall back to the XLA path in another dtype, if a mesh divides rows or heads unevenly, and
  `splash` for lengths that it does not support.
  """
  if implementation in ("auto", "xla"):
    return _attention(q, k, v, causal)
  return _by_kernel(q, k, v, causal, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
  # jax.nn.dot_product_attention asks for an algorithm in float16 that CPUs refuse.
  probs = _probabilities(q, k, causal)
  return _dot("BNTS,BSNH->BTNH", probs.astype(q.dtype), v).astype(q.dtype)


def _forward(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, tuple[Array, ...]]:
  return _attention(q, k, v, causal), (q, k, v)


def _backward(causal: bool, residuals: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array]:
  # Without the barrier XLA may merge these probabilities with the forward's, and keep them in memory.
  q, k, v, d_out = jax.lax.optimization_barrier((*residuals, d_out))
  probs = _probabilities(q, k, causal)
  d_probs = _dot("BTNH,BSNH->BNTS", d_out, v)
  d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdims=True))

  # The scale comes after the products: before the cast it would make float16 underflow to zero sooner.
  scale = q.shape[-1] ** -0.5
  d_scores = d_scores.astype(q.dtype)
  d_q = scale * _dot("BNTS,BSNH->BTNH", d_scores, k)
  d_k = scale * _dot("BNTS,BTNH->BSNH", d_scores, q)
  d_v = _dot("BNTS,BTNH->BSNH", probs.astype(q.dtype), d_out)
  return d_q.astype(q.dtype), d_k.astype(q.dtype), d_v.astype(q.dtype)


_attention.defvjp(_forward, _backward)


def _probabilities(q: Array, k: Array, causal: bool) -> Array:
  """Returns the softmax of the scaled scores: [B, N, T, S], at least float32."""
  scores = q.shape[-1] ** -0.5 * _dot("BTNH,BSNH->BNTS", q, k)
  if causal:
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
  return jax.nn.softmax(scores, axis=-1)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
  """Returns the product of operands in their own dtype, in at least float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


@as_its_module
def _by_kernel(q: Array, k: Array, v: Array, causal: bool, implementation: str) -> Array:
  """Applies a kernel to each device's rows and heads, if the module's dtype, the shape and the mesh allow it.

  An override or `flax`'s `init` may have another dtype; a model may be called with other lengths than in
  training. Compilers do not divide kernels, not even over an axis of one device. Rows are divided over `data`
  and `fsdp`, heads over `tensor`.
  """
  kernel = functools.partial(_KERNELS[implementation], causal=causal)
  mesh = jax.sharding.get_abstract_mesh()
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  free = [
    name for name, kind in kinds if kind is not AxisType.Manual
  ]  # the compiler divides arrays over them
  rows, heads = [name for name in free if name != "tensor"], [name for name in free if name == "tensor"]
  parts = lambda axes: math.prod(mesh.shape[name] for name in axes)
  if q.shape[0] % parts(rows) or q.shape[2] % parts(heads) or not _takes(implementation, q.shape, q.dtype):
    return _attention(q, k, v, causal)
  if not free:
    return kernel(q, k, v)
  spec = PartitionSpec(tuple(rows) or None, None, *heads)
  mapped = jax.shard_map(
    kernel, in_specs=(spec, spec, spec), out_specs=spec, axis_names=set(free), check_vma=False
  )
  return mapped(q, k, v)


def _takes(implementation: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
  """Returns whether a kernel, `cudnn` or `splash`, supports [B, T, N, H] of a dtype."""
  if implementation == "cudnn":
    return dtype in (jnp.bfloat16, jnp.float16)
  return dtype == jnp.bfloat16 and not (shape[1] % _LANES or shape[3] % _LANES)


def _cudnn_is_here(shape: tuple[int, ...], half: np.dtype) -> bool:
  """Returns whether this machine's GPU and its cuDNN have a kernel for such heads."""
  if not _takes("cudnn", shape, half) or jax.default_backend() != "gpu":  # compiled only where the GPU is
    return False
  capability = str(getattr(jax.local_devices()[0], "compute_capability", "none"))
  if not capability[:1].isdigit() or float(capability) < 8:  # a name on AMD's GPUs
    return False
  x = jax.ShapeDtypeStruct(shape, half)
  try:  # JAX checks what its cuDNN supports
    jax.eval_shape(jax.grad(lambda q, k, v: _cudnn(q, k, v, True).astype(jnp.float32).sum()), x, x, x)
  except (NotImplementedError, RuntimeError, ValueError):
    return False
  return True


def _cudnn(q: Array, k: Array, v: Array, causal: bool) -> Array:
  return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def _splash(q: Array, k: Array, v: Array, causal: bool) -> Array:
  kernel = _splash_kernel(q.shape[1], q.shape[2], causal)
  q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)  # the kernel does not scale
  by_head = lambda x: x.swapaxes(1, 2)
  return by_head(jax.vmap(kernel)(by_head(q), by_head(k), by_head(v)))


@functools.lru_cache(maxsize=16)
def _splash_kernel(length: int, heads: int, causal: bool) -> Callable[..., Array]:
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
    splash_attention_mask as masks,
  )

  one = (masks.CausalMask if causal else masks.FullMask)((length, length))
  block = next(size for size in (512, 256, 128) if length % size == 0)
  passes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
  blocks: dict[str, Any] = {f"block_{name}": block for name in passes}
  sizes = kernels.BlockSizes(**blocks)
  with jax.ensure_compile_time_eval():  # its tables are constants of every layer
    mask = masks.MultiHeadMask([one] * heads)
    return kernels.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)


_KERNELS = {"cudnn": _cudnn, "splash": _splash}
