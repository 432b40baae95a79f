"""`ViT`: a vision transformer (linen) that follows the dtype of its parameters and images."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from mpjax.zoo.models._attention import attention, split_heads
from mpjax.zoo.models._dropout import dropout, split


class ViT(nn.Module):
  """Pre-norm transformer on patches, with learned positions and mean pooling.

  Attributes:
    num_classes: number of classes.
    patch: side of the square patches; it divides the height and width of images.
    dim: width of the residual stream.
    layers: number of blocks.
    heads: attention heads; they divide `dim`.
    mlp_ratio: width of the MLP divided by `dim`.
    dropout: rate during training, on the embedding and on what each branch adds.
    attention: as for `mpjax.zoo.models._attention.attention`.
    remat: keep only each block's input for the backward pass, which computes the block again.
  """

  num_classes: int
  patch: int
  dim: int
  layers: int
  heads: int
  mlp_ratio: int = 4
  dropout: float = 0.0
  attention: str = "auto"
  remat: bool = False

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, row_rngs: jax.Array | None = None) -> jax.Array:
    """Returns the class logits, [B, num_classes], in the dtype that parameters and images promote to.

    `images` are floating [B, H, W, C]; H and W as at initialisation. With `train`, applies dropout, with keys
    [B] or else the key of the stream `dropout`.

    Raises:
      ValueError: for images of another shape, or sizes that do not fit together.
    """
    if self.dim % self.heads:
      raise ValueError(f"dim={self.dim} is not divisible by heads={self.heads}")
    x = nn.Dense(self.dim, name="embed")(patches(images, self.patch))  # [B, T, D]
    positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
    # Added in float32 because the gradient of the positions is a sum over the batch.
    x = (x + positions.astype(jnp.float32)).astype(x.dtype)
    keys: list[jax.Array | None] = [None] * (self.layers + 1)
    if train and self.dropout:
      keys[:] = split(self.make_rng("dropout") if row_rngs is None else row_rngs, self.layers + 1)
    x = dropout(x, self.dropout, keys[0])
    block = nn.remat(ViTBlock) if self.remat else ViTBlock
    for i in range(self.layers):
      x = block(self.heads, self.mlp_ratio, self.dropout, self.attention, name=f"block_{i}")(x, keys[i + 1])
    x = nn.LayerNorm(name="norm")(x).mean(1)
    return nn.Dense(self.num_classes, name="head")(x)


class ViTBlock(nn.Module):
  """Adds attention and an MLP to the stream, each computed from a normed copy."""

  heads: int
  mlp_ratio: int
  dropout: float
  attention: str

  @nn.compact
  def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the stream after the block: [B, T, D] -> [B, T, D]."""
    attention_key, mlp_key = (None, None) if key is None else split(key, 2)
    dim = x.shape[-1]
    qkv = nn.Dense(3 * dim, use_bias=False, name="qkv")
    q, k, v = split_heads(qkv(nn.LayerNorm(name="attention_norm")(x)), self.heads)
    y = attention(q, k, v, causal=False, implementation=self.attention).reshape(x.shape)
    x += dropout(nn.Dense(dim, use_bias=False, name="out")(y), self.dropout, attention_key)
    y = nn.Dense(self.mlp_ratio * dim, use_bias=False, name="up")(nn.LayerNorm(name="mlp_norm")(x))
    return x + dropout(nn.Dense(dim, use_bias=False, name="down")(nn.gelu(y)), self.dropout, mlp_key)


def patches(images: jax.Array, patch: int) -> jax.Array:
  """Cuts images into square patches: [B, H, W, C] -> [B, H W / patch^2, patch^2 C]."""
  if images.ndim != 4 or images.shape[1] % patch or images.shape[2] % patch:
    raise ValueError(
      f"images {list(images.shape)}: expected [B, H, W, C] with H and W divisible by patch={patch}"
    )
  batch, height, width, channels = images.shape
  x = images.reshape(batch, height // patch, patch, width // patch, patch, channels).swapaxes(2, 3)
  return x.reshape(batch, -1, patch * patch * channels)
