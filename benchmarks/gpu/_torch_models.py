"""The models of the gpu suite in plain PyTorch, equal to those of `_models.py` parameter by parameter.

RMS norms and rotary positions in the GPT, layer norms in the ViT, tanh GELU, biases where the others have
them, the same first distributions; attention by `scaled_dot_product_attention`, which takes a fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def build(task: dict[str, Any]) -> nn.Module:
  """The model of a task, on torch's default device."""
  sizes = task["sizes"]
  if task["kind"] == "gpt":
    return GPT(sizes["vocab"], sizes["dim"], sizes["layers"], sizes["heads"])
  if task["kind"] == "vit":
    tokens = (task["image"] // sizes["patch"]) ** 2
    return ViT(sizes["classes"], sizes["patch"], tokens, sizes["dim"], sizes["layers"], sizes["heads"])
  return ResNet50(sizes["classes"], sizes["stages"], sizes["width"])


def linear(size_in: int, size_out: int, std: float, bias: bool = False) -> nn.Linear:
  layer = nn.Linear(size_in, size_out, bias=bias)
  nn.init.normal_(layer.weight, std=std)
  if bias:
    nn.init.zeros_(layer.bias)
  return layer


class RMSNorm(nn.Module):
  """In float32, returned in the input's dtype."""

  def __init__(self, dim: int):
    super().__init__()
    self.scale = nn.Parameter(torch.ones(dim))

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
    return (y * self.scale).to(x.dtype)


class Block(nn.Module):
  """Attention and an MLP, each on a normed copy of the stream that it adds to; rotary with `rope`."""

  def __init__(self, dim: int, heads: int, norm: Any, causal: bool, std: float, residual_scale: float):
    super().__init__()
    self.heads, self.causal = heads, causal
    self.attention_norm, self.mlp_norm = norm(), norm()
    self.qkv = linear(dim, 3 * dim, std)
    self.out = linear(dim, dim, std * residual_scale)
    self.up = linear(dim, 4 * dim, std)
    self.down = linear(4 * dim, dim, std * residual_scale)

  def forward(self, x: torch.Tensor, rope: Any = None) -> torch.Tensor:
    split = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
    parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
    q, k, v = (part.view(split).transpose(1, 2) for part in parts)  # [B, N, T, H]
    if rope is not None:
      q, k = rotate(q, *rope), rotate(k, *rope)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
    x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
    return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
  first, second = x.float().chunk(2, -1)
  return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class GPT(nn.Module):
  """`tokens [B, T] -> logits [B, T, vocab]`."""

  def __init__(self, vocab: int, dim: int, layers: int, heads: int):
    super().__init__()
    self.half = dim // heads // 2
    self.embed = nn.Parameter(torch.randn(vocab, dim) * 0.02)
    norm = lambda: RMSNorm(dim)
    scale = (2 * layers) ** -0.5
    self.blocks = nn.ModuleList(Block(dim, heads, norm, True, 0.02, scale) for _ in range(layers))
    self.norm = norm()

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(self.half, device=tokens.device) / self.half)
    angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency  # [T, H/2]
    rope = angle.cos(), angle.sin()
    x = functional.embedding(tokens, self.embed)  # [B, T, D]
    for block in self.blocks:
      x = block(x, rope)
    return functional.linear(self.norm(x), self.embed)


class ViT(nn.Module):
  """`images [B, H, W, C] -> logits [B, classes]`."""

  def __init__(self, classes: int, patch: int, tokens: int, dim: int, layers: int, heads: int):
    super().__init__()
    self.patch = patch
    self.embed = linear(3 * patch**2, dim, (3 * patch**2) ** -0.5, bias=True)
    self.positions = nn.Parameter(torch.randn(tokens, dim) * 0.02)
    norm = lambda: nn.LayerNorm(dim, eps=1e-6)
    self.blocks = nn.ModuleList(Block(dim, heads, norm, False, dim**-0.5, 1.0) for _ in range(layers))
    for block in self.blocks:
      nn.init.normal_(block.down.weight, std=(4 * dim) ** -0.5)
    self.norm = norm()
    self.head = linear(dim, classes, dim**-0.5, bias=True)

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    batch, height, width, channels = images.shape
    p = self.patch
    x = images.view(batch, height // p, p, width // p, p, channels).transpose(2, 3)
    x = self.embed(x.reshape(batch, -1, p * p * channels)) + self.positions
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x).mean(1))


class ResNet50(nn.Module):
  """`images [B, C, H, W] -> logits [B, classes]`."""

  def __init__(self, classes: int, stages: list[int], width: int):
    super().__init__()
    self.stem, self.stem_norm = conv(3, width, 7, 2), nn.BatchNorm2d(width)
    blocks, size_in = [], width
    for stage, count in enumerate(stages):
      for i in range(count):
        channels = width * 2**stage
        blocks.append(Bottleneck(size_in, channels, 2 if stage and not i else 1))
        size_in = 4 * channels
    self.blocks = nn.ModuleList(blocks)
    self.head = linear(size_in, classes, size_in**-0.5, bias=True)

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    x = functional.relu(self.stem_norm(self.stem(images)))
    x = functional.max_pool2d(x, 3, 2, 1)
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
  """The stride is in the 3x3 convolution."""

  def __init__(self, size_in: int, channels: int, stride: int):
    super().__init__()
    wide = 4 * channels
    self.conv_0, self.norm_0 = conv(size_in, channels, 1), nn.BatchNorm2d(channels)
    self.conv_1, self.norm_1 = conv(channels, channels, 3, stride), nn.BatchNorm2d(channels)
    self.conv_2, self.norm_2 = conv(channels, wide, 1), nn.BatchNorm2d(wide)
    nn.init.zeros_(self.norm_2.weight)
    self.shortcut = None
    if size_in != wide or stride != 1:
      self.shortcut = nn.Sequential(conv(size_in, wide, 1, stride), nn.BatchNorm2d(wide))

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = functional.relu(self.norm_0(self.conv_0(x)))
    y = functional.relu(self.norm_1(self.conv_1(y)))
    y = self.norm_2(self.conv_2(y))
    return functional.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def conv(size_in: int, size_out: int, side: int, stride: int = 1) -> nn.Conv2d:
  layer = nn.Conv2d(size_in, size_out, side, stride, padding=side // 2, bias=False)
  nn.init.normal_(layer.weight, std=(size_in * side**2) ** -0.5)
  return layer
