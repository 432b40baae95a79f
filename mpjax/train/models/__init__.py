"""Models that follow the dtype of their parameters and inputs: no dtype arguments anywhere."""

from mpjax.train.models.gpt import GPT
from mpjax.train.models.resnet import ResNet
from mpjax.train.models.vit import ViT

__all__ = ["GPT", "ResNet", "ViT"]
