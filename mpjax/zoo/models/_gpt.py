"""`GPT`: a decoder-only transformer (nnx) that follows the dtype of its parameters.

The model names no compute dtype: cast the parameters to half precision, and every matrix product runs in
half precision. The float32 islands (norm statistics, rotations, softmax) return the dtype of their inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.zoo.models._attention import attention, split_heads
from mpjax.zoo.models._dropout import dropout, split


class GPT(nnx.Module):
  """Pre-norm transformer with a GELU MLP. Only layer norms have biases.

  Its parameters are its whole state: in `nnx.split(model, nnx.Param, ...)` the rest is empty.

  Args:
    vocab_size: number of tokens.
    max_len: longest sequence, for learned positions.
    dim: width of the residual stream.
    layers: number of blocks.
    heads: attention heads; they divide `dim`.
    mlp_ratio: width of the MLP divided by `dim`.
    norm: `rms` or `layer`.
    positions: `rope` rotates queries and keys; `learned` adds a table to the embedding.
    dropout: rate, on the embedding and on what each branch adds; used only if a call has a key.
    tie_head: use the embedding as the output matrix, too.
    attention: as for `mpjax.zoo.models._attention.attention`.
    remat: keep only each block's input for the backward pass, which computes the block again.
    rngs: keys for the parameters; not kept.

  Raises:
    ValueError: for sizes that do not fit together.
  """

  def __init__(
    self,
    *,
    vocab_size: int,
    max_len: int,
    dim: int,
    layers: int,
    heads: int,
    mlp_ratio: int = 4,
    norm: str = "rms",
    positions: str = "rope",
    dropout: float = 0.0,
    tie_head: bool = True,
    attention: str = "auto",
    remat: bool = False,
    rngs: nnx.Rngs,
  ):
    if dim % heads:
      raise ValueError(f"dim={dim} is not divisible by heads={heads}")
    if positions == "rope" and dim // heads % 2:
      raise ValueError(
        f"dim={dim} with heads={heads} makes heads of {dim // heads}: positions='rope' rotates pairs, "
        "choose an even head size or positions='learned'"
      )

    table = _normal()
    self.embed = nnx.Param(table(rngs.params(), (vocab_size, dim)))
    self.positions = nnx.Param(table(rngs.params(), (max_len, dim))) if positions == "learned" else None
    # Each block adds to the residual stream twice; the scale keeps the variance independent of depth.
    residual_scale = (2 * layers) ** -0.5
    sizes, rope = (dim, heads, mlp_ratio * dim), positions == "rope"
    self.blocks = nnx.List(
      GPTBlock(sizes, norm, rope, dropout, attention, residual_scale, rngs) for _ in range(layers)
    )
    self.norm = Norm(dim, norm)
    self.head = None if tie_head else _linear(dim, vocab_size, rngs)
    self.dropout = dropout
    self.remat = remat

  def __call__(self, tokens: jax.Array, *, rng: jax.Array | None = None) -> jax.Array:
    """Returns the logits of each next token, [B, T, vocab_size] in the parameters' dtype.

    `tokens` are integer [B, T]; learned positions limit T to `max_len`. `rng` is a key for dropout, or keys
    [B], one for each row.
    """
    x = self.hidden(tokens, rng=rng)
    if self.head is not None:
      return self.head(x)
    with jax.named_scope("head"):  # an override finds it by this name
      return x @ self.head_kernel

  @property
  def head_kernel(self) -> jax.Array:
    """The output matrix: [D, vocab_size]."""
    return self.embed[...].T if self.head is None else self.head.kernel[...]

  def hidden(self, tokens: jax.Array, *, rng: jax.Array | None = None) -> jax.Array:
    """Returns the input of the output matrix, [B, T, D]. Takes what `__call__` does."""
    keys: list[jax.Array | None] = [None] * (len(self.blocks) + 1)
    if rng is not None and self.dropout:
      keys[:] = split(rng, len(self.blocks) + 1)

    # The tables are read in float32 because their gradients sum over every use of a row.
    x = _float32(self.embed[...])[tokens]
    if self.positions is not None:
      x += _float32(self.positions[: tokens.shape[1]])
    x = dropout(x.astype(self.embed.dtype), self.dropout, keys[0])  # [B, T, D]
    for block, key in zip(self.blocks, keys[1:], strict=True):
      # Called through the class, so that profiles and plans see the module's name.
      x = (nnx.remat(type(block).__call__) if self.remat else type(block).__call__)(block, x, key)
    return self.norm(x)


class GPTBlock(nnx.Module):
  """Adds attention and an MLP to the stream, each computed from a normed copy."""

  def __init__(
    self,
    sizes: tuple[int, int, int],
    norm: str,
    rope: bool,
    dropout: float,
    attention: str,
    residual_scale: float,
    rngs: nnx.Rngs,
  ):
    dim, heads, hidden = sizes
    self.attention_norm = Norm(dim, norm)
    self.qkv = _linear(dim, 3 * dim, rngs)
    self.out = _linear(dim, dim, rngs, residual_scale)
    self.mlp_norm = Norm(dim, norm)
    self.up = _linear(dim, hidden, rngs)
    self.down = _linear(hidden, dim, rngs, residual_scale)
    self.heads = heads
    self.rope = rope
    self.dropout = dropout
    self.implementation = attention

  def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the stream after the block: [B, T, D] -> [B, T, D]."""
    attention_key, mlp_key = (None, None) if key is None else split(key, 2)
    x += dropout(self.attend(self.attention_norm(x)), self.dropout, attention_key)
    hidden = jax.nn.gelu(self.up(self.mlp_norm(x)))  # [B, T, mlp_ratio * D]
    return x + dropout(self.down(hidden), self.dropout, mlp_key)

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns causal attention: [B, T, D] -> [B, T, D]."""
    q, k, v = split_heads(self.qkv(x), self.heads)  # [B, T, N, H]
    if self.rope:
      q, k = rotate(q), rotate(k)
    out = attention(q, k, v, causal=True, implementation=self.implementation)
    return self.out(out.reshape(x.shape))


class Norm(nnx.Module):
  """RMS norm or layer norm over the last axis, in float32; the result is in the input's dtype."""

  def __init__(self, dim: int, kind: str):
    self.scale = nnx.Param(jnp.ones(dim))
    self.bias = nnx.Param(jnp.zeros(dim)) if kind == "layer" else None

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises the input: [..., D] -> [..., D]."""
    y = _float32(x)
    if self.bias is not None:
      y -= y.mean(-1, keepdims=True)
    y *= jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    y *= _float32(self.scale[...])
    if self.bias is not None:
      y += _float32(self.bias[...])
    return y.astype(x.dtype)


def rotate(x: jax.Array, base: float = 10000.0) -> jax.Array:
  """Rotates x [B, T, N, H] by position: products of rotated vectors depend on their distance only.

  Entry i makes a pair with entry i + H/2 (arXiv 2104.09864). The wavelengths range from 2 pi to 2 pi `base`;
  the angles and the rotation are float32.
  """
  length, half = x.shape[1], x.shape[3] // 2
  frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency  # [T, 1, H/2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(_float32(x), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _linear(size_in: int, size_out: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
  return nnx.Linear(size_in, size_out, use_bias=False, kernel_init=_normal(scale), rngs=rngs)


def _normal(scale: float = 1.0) -> nnx.Initializer:
  return nnx.initializers.normal(0.02 * scale)


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
