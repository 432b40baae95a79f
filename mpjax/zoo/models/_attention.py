"""Attention whose matrix products, forward and backward, take operands in the dtype of its inputs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mpjax.casting import as_its_module
from mpjax.zoo.models._fused_attention import IMPLEMENTATIONS, on_parts, takes, takes_dtype


def split_heads(qkv: jax.Array, heads: int) -> list[jax.Array]:
  """Returns queries, keys and values: [B, T, 3 D] with columns by head -> three of [B, T, N, H].

  The columns are q, k and v of the first head, then of the second, and so on. A device that holds a part of
  the columns has q, k and v of the same heads, and no data moves.
  """
  each = qkv.reshape(*qkv.shape[:-1], heads, 3, -1)
  return [each[..., i, :] for i in range(3)]


def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, implementation: str = "auto"
) -> jax.Array:
  """Returns `softmax(q k^T / sqrt(H)) v` for each head, [B, T, N, H], of q's floating dtype.

  On the XLA path softmax and its gradient are float32. Matrix products take operands in the inputs' dtype
  and accumulate in float32. Only `q` [B, T, N, H], `k` and `v` [B, S, N, H] are kept for the backward pass,
  which computes the probabilities again. There is only a reverse-mode rule (no `jax.jvp`).

  With `causal`, position t sees positions 0 to t only. `implementation` is `xla`, or a fused kernel: `cudnn`
  (half precision on NVIDIA GPUs) or `splash` (bfloat16 on TPUs). Under autocast the module's dtype counts.
  Kernels fall back to the XLA path in another dtype, if a mesh divides rows or heads unevenly, and `splash`
  for lengths that it does not support.

  Raises:
    ValueError: for another implementation, or shapes or dtypes that do not fit together.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"attention={implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
  if q.ndim != 4 or k.shape != v.shape or q.shape != (q.shape[0], q.shape[1], *k.shape[2:]):
    raise ValueError(
      f"attention of q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}: expected [B, T, N, H] for q and "
      "[B, S, N, H] for k and v"
    )
  if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
    raise ValueError(
      f"attention of q {q.dtype}, k {k.dtype}, v {v.dtype}: expected one floating dtype, cast them alike"
    )
  if implementation in ("cudnn", "splash") and takes(implementation, q, k):
    return _in_its_dtype(q, k, v, causal, implementation)
  return _attention(q, k, v, causal)


@as_its_module
def _in_its_dtype(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, implementation: str) -> jax.Array:
  """Applies a kernel if the module computes in its dtype; an override or `flax`'s `init` may not."""
  if takes_dtype(implementation, q.dtype):
    return on_parts(implementation, q, k, v, causal)
  return _attention(q, k, v, causal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
  # jax.nn.dot_product_attention asks for an algorithm in float16 that CPUs refuse.
  probs = _probabilities(q, k, causal)
  return _dot("BNTS,BSNH->BTNH", probs.astype(q.dtype), v).astype(q.dtype)


def _forward(
  q: jax.Array, k: jax.Array, v: jax.Array, causal: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _attention(q, k, v, causal), (q, k, v)


def _backward(
  causal: bool, residuals: tuple[jax.Array, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def _probabilities(q: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
  """Returns the softmax of the scaled scores: [B, N, T, S], at least float32."""
  scores = q.shape[-1] ** -0.5 * _dot("BTNH,BSNH->BNTS", q, k)
  if causal:
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
  return jax.nn.softmax(scores, axis=-1)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the product of operands in their own dtype, in at least float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
