"""What stands out in a report, and the policy that mends it."""

from mpjax.numerics.advice._advice import advice_for

__all__ = ["advice_for"]
