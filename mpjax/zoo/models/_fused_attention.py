"""JAX's fused attention kernels, cuDNN's on a GPU and splash on a TPU, and the choice among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from mpjax._types import Array

if TYPE_CHECKING:  # models do not need the packages that read data
  from mpjax.registry._task import ModelInfo

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
_SHORTEST = 1024  # below this, splash needs more memory than the scores (TPU v5e)
_LANES = 128


def chosen_attention(asked: str, info: ModelInfo, *, heads: int, head_dim: int, length: int) -> str:
  """Chooses the implementation of attention for a run: `xla`, `cudnn` or `splash`.

  `auto` chooses a fused kernel if one supports the platform, the policy's compute dtype and rows of `length`
  positions, and `xla` otherwise.
  """
  if asked == "xla":
    return "xla"
  half = info.policy.compute_dtype
  if info.backend == "gpu" and _cudnn_takes((1, length, heads, head_dim), half):
    return "cudnn"
  fits = length >= _SHORTEST and not (length % _LANES or head_dim % _LANES)
  return "splash" if info.backend == "tpu" and fits and half == jnp.bfloat16 else "xla"


def takes(implementation: str, q: Array, k: Array) -> bool:
  """Returns whether `on_parts` can apply a kernel, `cudnn` or `splash`, to arrays of these shapes.

  A model may be called with other lengths than in training, and with rows or heads that the mesh does not
  divide. `takes_dtype` checks the dtype.
  """
  free = _free_axes()
  rows = math.prod(size for name, size in free.items() if name != "tensor")
  if q.shape[0] % rows or q.shape[2] % free.get("tensor", 1):
    return False
  return implementation == "cudnn" or not (q.shape[1] % _LANES or k.shape[1] % _LANES or q.shape[3] % _LANES)


def takes_dtype(implementation: str, dtype: np.dtype) -> bool:
  """Returns whether a kernel, `cudnn` or `splash`, supports a dtype."""
  return dtype == jnp.bfloat16 or (implementation == "cudnn" and dtype == jnp.float16)


def on_parts(implementation: str, q: Array, k: Array, v: Array, causal: bool) -> Array:
  """Applies a kernel, `cudnn` or `splash`, to each device's rows and heads: [B, T, N, H] -> [B, T, N, H].

  Compilers do not divide kernels, not even over an axis of one device. Rows are divided over `data` and
  `fsdp`, heads over `tensor`. Keys and values are [B, S, N, H].
  """
  kernel = {"cudnn": _cudnn, "splash": _splash}[implementation]
  free = _free_axes()
  if not free:
    return kernel(q, k, v, causal)
  rows = tuple(name for name in free if name != "tensor")
  spec = PartitionSpec(rows or None, None, "tensor" if "tensor" in free else None)
  mapped = jax.shard_map(
    lambda q, k, v: kernel(q, k, v, causal),
    in_specs=(spec, spec, spec),
    out_specs=spec,
    axis_names=set(free),
    check_vma=False,
  )
  return mapped(q, k, v)


def _free_axes() -> dict[str, int]:
  """Returns the sizes of the axes of the current mesh over which the compiler divides arrays."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {name: mesh.shape[name] for name, kind in axes if kind is not AxisType.Manual}


def _cudnn_takes(shape: tuple[int, ...], half: np.dtype) -> bool:
  """Returns whether this machine's GPU and its cuDNN have a kernel for such heads."""
  if half.itemsize != 2 or jax.default_backend() != "gpu":  # it can be compiled only where the GPU is
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
  kernel = _splash_kernel(q.shape[1], k.shape[1], q.shape[2], causal)
  q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)  # the kernel does not scale
  by_head = lambda x: x.swapaxes(1, 2)
  return by_head(jax.vmap(kernel)(by_head(q), by_head(k), by_head(v)))


@functools.lru_cache(maxsize=16)
def _splash_kernel(queries: int, keys: int, heads: int, causal: bool) -> Callable[..., Array]:
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
  )

  mask = splash_attention_mask
  one = mask.CausalMask((queries, keys)) if causal else mask.FullMask((queries, keys))
  block_q, block_k = (next(b for b in (512, 256, 128) if n % b == 0) for n in (queries, keys))
  sizes = splash_attention_kernel.BlockSizes(
    block_q=block_q,
    block_kv=block_k,
    block_kv_compute=block_k,
    block_q_dkv=block_q,
    block_kv_dkv=block_k,
    block_kv_dkv_compute=block_k,
    block_q_dq=block_q,
    block_kv_dq=block_k,
  )
  with jax.ensure_compile_time_eval():  # its tables are constants of every layer
    return splash_attention_kernel.make_splash_mha(
      mask=mask.MultiHeadMask([one] * heads), head_shards=1, q_seq_shards=1, block_sizes=sizes
    )
