"""Rules that divide the parameters of the built-in models over a mesh, by what their dimensions are."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpjax.patterns import component_regex
from mpjax.sharding import RuleDims, ShardingRule

# The kinds of a dimension: its mesh axis.
AXIS_OF_KIND = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor", "features": "tensor"}

_BLOCK = {
  "qkv/kernel": ("embed", "heads"),
  "out/kernel": ("heads", "embed"),
  "up/kernel": ("embed", "mlp"),
  "down/kernel": ("mlp", "embed"),
}
GPT = {"embed": ("vocab", "embed"), "positions": (None, "embed"), "head/kernel": ("embed", "vocab"), **_BLOCK}
VIT = {
  "embed/kernel": (None, "embed"),
  "positions": (None, "embed"),
  "head/kernel": ("embed", None),
  **_BLOCK,
}
RESNET = {"(stem|conv_.|shortcut)/kernel": (None, None, "embed", "features"), "head/kernel": ("embed", None)}


def _axes(
  kinds: Mapping[str, tuple[str | None, ...]], path: str, shape: tuple[int, ...], heads: int | None = None
) -> RuleDims | None:
  """Returns a mesh axis for each dimension of a parameter, by its path in a model; `None`: no opinion.

  A dimension of heads is divided where the axis divides their number, if it is given.
  """
  for pattern, names in kinds.items():
    if component_regex(pattern).search(path) and len(names) == len(shape):
      axes = [AXIS_OF_KIND[name] if name else None for name in names]
      whole = lambda name, axis: (axis, heads) if axis and name == "heads" and heads else axis
      return [whole(name, axis) for name, axis in zip(names, axes, strict=True)]
  return None


def gpt_sharding(path: str, shape: tuple[int, ...], heads: int | None = None) -> RuleDims | None:
  """Returns where a parameter of a `GPT` lies; of one whose `heads` are given, each head is on one device."""
  return _axes(GPT, path, shape, heads)


def vit_sharding(path: str, shape: tuple[int, ...], heads: int | None = None) -> RuleDims | None:
  """Returns where a parameter of a `ViT` lies; of one whose `heads` are given, each head is on one device."""
  return _axes(VIT, path, shape, heads)


resnet_sharding: ShardingRule = functools.partial(_axes, RESNET)
