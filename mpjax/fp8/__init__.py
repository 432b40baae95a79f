"""The scaling of FP8 products: recipes, scales, delayed state, and devices. Independent of the products."""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.fp8._recipe import Recipe

__all__ = ["Recipe"]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
