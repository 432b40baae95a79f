"""What FP8 products are scaled by: recipes, scales, delayed state, and devices. Knows no product."""

from mpjax.fp8._recipe import Recipe

__all__ = ["Recipe"]
