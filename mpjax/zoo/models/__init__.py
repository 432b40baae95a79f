"""Models that follow the dtype of their parameters and inputs, without dtype arguments."""

from mpjax.zoo.models._attention import chosen_attention as chosen_attention
from mpjax.zoo.models._gpt import GPT as GPT
from mpjax.zoo.models._model_sharding import (
  gpt_sharding as gpt_sharding,
  resnet_sharding as resnet_sharding,
  vit_sharding as vit_sharding,
)
from mpjax.zoo.models._resnet import ResNet as ResNet
from mpjax.zoo.models._vit import ViT as ViT
