"""Modules that take long to import and that not everyone needs, imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Lazy:
  """A module that is imported by the first look at what is in it."""

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
  from flax import nnx
else:
  nnx = _Lazy("flax.nnx")  # half of what `import mpjax` would take beyond jax, flax and optax

__all__ = ["nnx"]
