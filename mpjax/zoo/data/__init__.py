"""Datasets: text, token numbers, and images with labels."""

from mpjax.zoo.data import _huggingface, _images, _text, _tokens  # noqa: F401 (they register what they read)
