"""Models that follow the dtype of their parameters and inputs, without dtype arguments."""

from mpjax.zoo.models._gpt import GPT
from mpjax.zoo.models._model_sharding import gpt_sharding, resnet_sharding, vit_sharding
from mpjax.zoo.models._resnet import ResNet
from mpjax.zoo.models._vit import ViT

__all__ = ["GPT", "ResNet", "ViT", "gpt_sharding", "resnet_sharding", "vit_sharding"]
