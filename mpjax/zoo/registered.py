"""Registers the models and datasets that come with mpjax. Needs only what a user's plug-in needs."""

from mpjax.zoo.data import (
  _huggingface as _huggingface,
  _images as _images,
  _text as _text,
  _tokens as _tokens,
)
from mpjax.zoo.models import _classifiers as _classifiers, _language_model as _language_model
