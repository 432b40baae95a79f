"""Models that follow the dtype of their parameters and inputs, without dtype arguments.

They are imported when they are used: to read a config takes no model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from mpjax.zoo.models._gpt import GPT
  from mpjax.zoo.models._model_sharding import gpt_sharding, resnet_sharding, vit_sharding
  from mpjax.zoo.models._resnet import ResNet
  from mpjax.zoo.models._vit import ViT

__all__ = ["GPT", "ResNet", "ViT", "gpt_sharding", "resnet_sharding", "vit_sharding"]

_MODULES = {"GPT": "_gpt", "ResNet": "_resnet", "ViT": "_vit"}


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.{_MODULES.get(name, '_model_sharding')}")
  return getattr(module, name)
