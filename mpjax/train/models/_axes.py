"""What the dimensions of the built-in models' parameters are, and the mesh axes that each kind goes over."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpjax.patterns import component_regex
from mpjax.sharding._sharding_rules import Dims

# The kinds of a dimension: its mesh axis.
LOGICAL = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor", "features": "tensor"}

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


def mesh_axes(names: Mapping[str, tuple[str | None, ...]], path: str, shape: tuple[int, ...]) -> Dims | None:
  """A mesh axis for each dimension of a parameter, by its path in a model; `None` for no opinion."""
  for pattern, kinds in names.items():
    if component_regex(pattern).search(path) and len(kinds) == len(shape):
      return [LOGICAL[kind] if kind else None for kind in kinds]
  return None


gpt_axes = functools.partial(mesh_axes, GPT)
vit_axes = functools.partial(mesh_axes, VIT)
resnet_axes = functools.partial(mesh_axes, RESNET)
