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
from mpjax.registry._names import ConfigError

if TYPE_CHECKING:  # models do not need the packages that read data
  from mpjax.registry._task import ModelInfo

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
_SHORTEST = 1024  # below this, splash needs more memory than the scores (TPU v5e)
_LANES = 128


def chosen_attention(asked: str, info: ModelInfo, *, heads: int, head_dim: int, length: int) -> str:
  """Chooses the implementation of attention for a run: `xla`, `cudnn` or `splash`.

  `auto` chooses a fused kernel if one supports the platform, the policy's compute dtype and these shapes,
  and `xla` otherwise.

  Args:
    asked: the config's `model.attention`.
    info: the policy and the platform.
    heads: number of heads of a layer.
    head_dim: columns of a head.
    length: positions in a row.

  Raises:
    ConfigError: if the config names a kernel that cannot run.
  """
  obstacles = {"cudnn": _no_cudnn, "splash": _no_splash}
  if asked in obstacles:
    reason = obstacles[asked](info, heads, head_dim, length)
    if reason:
      where = f"on {info.backend} in {info.policy.compute_dtype.name}"
      raise ConfigError(f"model.attention={asked} {where}: {reason}; use auto")
    return asked
  if asked == "auto":
    kernels = ["cudnn"] if length < _SHORTEST else ["cudnn", "splash"]
    for name in kernels:
      if not obstacles[name](info, heads, head_dim, length):
        return name
  return "xla"


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
  """Applies a kernel to each device's rows and heads, over the mesh axes that the compiler divides.

  Compilers do not divide kernels, not even over an axis of one device. Rows are divided over `data` and
  `fsdp`, heads over `tensor`.

  Args:
    implementation: `cudnn` or `splash`.
    q: [B, T, N, H].
    k: [B, S, N, H].
    v: [B, S, N, H].
    causal: position t sees positions 0 to t only.

  Returns:
    [B, T, N, H].
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


def _no_cudnn(info: ModelInfo, heads: int, head_dim: int, length: int) -> str | None:
  """Returns why this model cannot use cuDNN attention, or `None` if it can."""
  half = info.policy.compute_dtype
  if info.backend != "gpu" or half.itemsize != 2:
    return "the fused kernel needs an NVIDIA GPU and a half-precision policy"
  if jax.default_backend() != "gpu":
    return "it can be compiled only on a machine that has the GPU"
  capability = str(getattr(jax.local_devices()[0], "compute_capability", "none"))
  if not capability[:1].isdigit() or float(capability) < 8:  # a name on AMD's GPUs
    return f"it needs an NVIDIA GPU of compute capability 8.0, and this GPU has {capability}"
  x = jax.ShapeDtypeStruct((1, length, heads, head_dim), half)
  try:  # JAX checks what its cuDNN supports
    jax.eval_shape(jax.grad(lambda q, k, v: _cudnn(q, k, v, True).astype(jnp.float32).sum()), x, x, x)
  except (NotImplementedError, RuntimeError, ValueError) as error:
    return " ".join(str(error).split())
  return None


def _no_splash(info: ModelInfo, heads: int, head_dim: int, length: int) -> str | None:
  """Returns why this model cannot use splash attention, or `None` if it can."""
  del heads
  if info.backend != "tpu" or info.policy.compute_dtype != jnp.bfloat16:
    return "the fused kernel needs a TPU and a bfloat16 policy"
  if length % _LANES or head_dim % _LANES:
    return f"it needs rows and heads that are multiples of {_LANES}, not {length} positions and {head_dim}"
  return None


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
