"""Findings in a report, and the policy that mends them."""

from mpjax.numerics.advice._advice import advice_for

__all__ = ["advice_for"]
