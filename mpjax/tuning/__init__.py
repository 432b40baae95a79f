"""`tune`: the cheapest policy that is good enough, by its cost on a device and its gradient error."""

from mpjax.tuning._gradient_error import GradientError, Noise
from mpjax.tuning._result import Cost, Trial, TuneResult
from mpjax.tuning._tune import tune

__all__ = ["Cost", "GradientError", "Noise", "Trial", "TuneResult", "tune"]
