"""Rules that divide the parameters of the built-in models over a mesh, by what their dimensions are."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpjax.patterns import component_regex
from mpjax.sharding import Dims, ShardingRule

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


def _axes(kinds: Mapping[str, tuple[str | None, ...]], path: str, shape: tuple[int, ...]) -> Dims | None:
  """Returns a mesh axis for each dimension of a parameter, by its path in a model; `None`: no opinion."""
  for pattern, names in kinds.items():
    if component_regex(pattern).search(path) and len(names) == len(shape):
      return [AXIS_OF_KIND[name] if name else None for name in names]
  return None


gpt_sharding: ShardingRule = functools.partial(_axes, GPT)
vit_sharding: ShardingRule = functools.partial(_axes, VIT)
resnet_sharding: ShardingRule = functools.partial(_axes, RESNET)
