"""The scaling of FP8 products: recipes, scales, delayed state, and devices. Independent of the products."""

from mpjax.fp8._recipe import Recipe

__all__ = ["Recipe"]
