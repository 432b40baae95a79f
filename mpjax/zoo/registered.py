"""Registers the models and datasets that come with mpjax. Needs only what a user's plug-in needs."""

from mpjax.zoo import _tasks as _tasks
from mpjax.zoo.data import _huggingface as _huggingface, _images as _images, _text as _text
