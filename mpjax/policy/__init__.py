"""Policies: the dtype of everything, as data that a YAML file, a string or a `jmp.Policy` can hold.

`get_policy` makes a policy; `Policy.to_dict` and `str` write one.
"""

from mpjax.policies import presets
from mpjax.policy._loss_scaling import (
  HIGHEST as HIGHEST,
  PRESETS as PRESETS,
  LossScaling,
  LossScalingSpec as LossScalingSpec,
  number as number,
  parse_loss_scaling as parse_loss_scaling,
)
from mpjax.policy._override import Override
from mpjax.policy._policy import (
  Policy,
  as_changes as as_changes,
  get_policy,
  matmul_precision,
  parse_overrides,
)
from mpjax.policy._policy_text import brief as brief
from mpjax.policy._precision_warning import (
  PrecisionWarning,
  bare_dtype_advice as bare_dtype_advice,
  warn_of_bare_dtype as warn_of_bare_dtype,
  warn_without_scale as warn_without_scale,
)

# What is imported as itself is for other folders of mpjax, not for users.
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
