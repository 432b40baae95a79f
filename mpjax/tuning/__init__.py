"""`tune`: the cheapest policy that is good enough, by what it costs on a device and does to the gradients."""

from mpjax.tuning._gradient_error import GradientError, Noise
from mpjax.tuning._result import TuneResult
from mpjax.tuning._trials import Cost, Trial
from mpjax.tuning._tune import tune

__all__ = ["Cost", "GradientError", "Noise", "Trial", "TuneResult", "tune"]
