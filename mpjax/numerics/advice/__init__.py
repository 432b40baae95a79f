"""The findings of a report, and a policy that should fix the problems among them."""

from mpjax.numerics.advice._advice import with_conclusions

__all__ = ["with_conclusions"]
