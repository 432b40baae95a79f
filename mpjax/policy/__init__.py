"""Policies: the dtype of everything, as data that a YAML file, a string or a `jmp.Policy` can hold.

`get_policy` makes a policy; `Policy.to_dict` and `str` write one.
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
