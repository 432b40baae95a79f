"""Policies: which dtype holds what, as data that a YAML file, a string or a `jmp.Policy` can give.

`get_policy` is the one way in; `Policy.to_dict` and `str` are the ways out.
"""

from mpjax.policies import presets
from mpjax.policy._loss_scaling import LossScaling
from mpjax.policy._override import Override
from mpjax.policy._policy import Policy, get_policy, matmul_precision, parse_overrides
from mpjax.policy._precision_warning import PrecisionWarning

__all__ = [
  "LossScaling",
  "Override",
  "Policy",
  "PrecisionWarning",
  "get_policy",
  "matmul_precision",
  "parse_overrides",
  "presets",
]
