"""Registers the models and datasets that come with mpjax. Needs only what a user's plug-in needs."""

from mpjax.zoo.data import _huggingface as _huggingface
from mpjax.zoo.data import _images as _images
from mpjax.zoo.data import _text as _text
from mpjax.zoo.data import _tokens as _tokens
from mpjax.zoo.models import _classifiers as _classifiers
from mpjax.zoo.models import _language_model as _language_model
