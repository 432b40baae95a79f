"""Rules that divide the parameters of the built-in models over a mesh, by the kind of each dimension."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpjax.patterns import component_regex
from mpjax.sharding import RuleDims

# The mesh axis of each kind of dimension.
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
  """Returns a mesh axis for each dimension of a parameter, by its path; `None` if no rule matches.

  If `heads` is given, a dimension of heads is divided only if the axis divides the number of heads.
  """
  for pattern, names in kinds.items():
    if component_regex(pattern).search(path) and len(names) == len(shape):
      axes = [AXIS_OF_KIND[name] if name else None for name in names]
      whole = lambda name, axis: (axis, heads) if axis and name == "heads" and heads else axis
      return [whole(name, axis) for name, axis in zip(names, axes, strict=True)]
  return None


gpt_sharding = functools.partial(_axes, GPT)
vit_sharding = functools.partial(_axes, VIT)
resnet_sharding = functools.partial(_axes, RESNET)
