"""FP8 matrix products: recipes, scaling, and `fp8_dot_general`. Knows nothing of policies or autocast."""

from mpjax.fp8._dot_general import fp8_dot_general
from mpjax.fp8._recipe import Recipe

__all__ = [
  "Recipe",
  "fp8_dot_general",
]
