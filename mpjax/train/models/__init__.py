"""Models that follow the dtype of their parameters and inputs: no dtype arguments anywhere."""

from mpjax.train.models._gpt import GPT
from mpjax.train.models._resnet import ResNet
from mpjax.train.models._vit import ViT

__all__ = ["GPT", "ResNet", "ViT"]
