"""Rules that divide the parameters of the built-in models over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpjax.patterns import component_regex
from mpjax.sharding import RuleDims

# An axis for each dimension; `heads` is `tensor`, which keeps each attention head on one device.
_BLOCK = {
  "qkv/kernel": ("fsdp", "heads"),
  "out/kernel": ("heads", "fsdp"),
  "up/kernel": ("fsdp", "tensor"),
  "down/kernel": ("tensor", "fsdp"),
}
GPT = {"embed": ("tensor", "fsdp"), "positions": (None, "fsdp"), "head/kernel": ("fsdp", "tensor"), **_BLOCK}
VIT = {
  "embed/kernel": (None, "fsdp"),
  "positions": (None, "fsdp"),
  "head/kernel": ("fsdp", None),
  **_BLOCK,
}
RESNET = {"(stem|conv_.|shortcut)/kernel": (None, None, "fsdp", "tensor"), "head/kernel": ("fsdp", None)}


def _axes(
  rules: Mapping[str, tuple[str | None, ...]], path: str, shape: tuple[int, ...], heads: int | None = None
) -> RuleDims | None:
  """Returns a mesh axis for each dimension of a parameter, by its path; `None` if no rule matches."""
  for pattern, axes in rules.items():
    if component_regex(pattern).search(path) and len(axes) == len(shape):
      of_heads = ("tensor", heads) if heads else "tensor"
      return [of_heads if axis == "heads" else axis for axis in axes]
  return None


gpt_sharding = functools.partial(_axes, GPT)
vit_sharding = functools.partial(_axes, VIT)
resnet_sharding = functools.partial(_axes, RESNET)
