"""`ResNet`: a residual network with BatchNorm (linen) that follows the dtype of its parameters and images."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax

from mpjax.sharding import batch_axes


class ResNet(nn.Module):
  """Basic blocks of two 3x3 convolutions after a 3x3 stem, with pooling only at the end: for small images.

  The statistics of BatchNorm (collection `batch_stats`) are always float32.

  Attributes:
    num_classes: number of classes.
    stages: number of blocks of each stage; every stage but the first halves height and width.
    width: channels of the first stage; each later stage has twice as many.
    remat: keep only each block's input for the backward pass, which computes the block again.
  """

  num_classes: int
  stages: tuple[int, ...] = (2, 2, 2)
  width: int = 32
  remat: bool = False

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the class logits, [B, num_classes], in the dtype that parameters and images promote to.

    `images` are floating [B, H, W, C]. With `train`, normalises by the statistics of the batch and, if
    `batch_stats` is mutable, updates the running statistics; else normalises by these.
    """
    x = nn.Conv(self.width, (3, 3), use_bias=False, name="stem")(images)
    x = nn.relu(_batch_norm(train)(name="stem_norm")(x))
    block = nn.remat(ResidualBlock, static_argnums=(2,)) if self.remat else ResidualBlock
    for stage, blocks in enumerate(self.stages):
      for i in range(blocks):
        stride = 2 if stage > 0 and i == 0 else 1
        x = block(self.width * 2**stage, stride, name=f"stage_{stage}_block_{i}")(x, train)
    return nn.Dense(self.num_classes, name="head")(x.mean((1, 2)))


class ResidualBlock(nn.Module):
  """Two convolutions and a shortcut, which is a projection if the shape changes."""

  channels: int
  stride: int

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Applies the block: [B, H, W, C] -> [B, H / stride, W / stride, channels]."""
    conv = functools.partial(nn.Conv, self.channels, use_bias=False)
    norm = _batch_norm(train)
    y = nn.relu(norm(name="norm_0")(conv((3, 3), self.stride, name="conv_0")(x)))
    y = conv((3, 3), name="conv_1")(y)
    # With scale zero, each block starts as its shortcut.
    y = norm(name="norm_1", scale_init=nn.initializers.zeros)(y)
    if x.shape != y.shape:
      x = norm(name="shortcut_norm")(conv((1, 1), self.stride, name="shortcut")(x))
    return nn.relu(x + y)


def _batch_norm(train: bool) -> functools.partial[nn.BatchNorm]:
  # Statistics are over the whole batch, also if a step divides it over devices.
  axes = batch_axes() or None
  return functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=axes)
