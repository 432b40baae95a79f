"""The findings of a report, and a policy that fixes the problems among them."""

from mpjax.numerics.advice._advice import advice_for

__all__ = ["advice_for"]
