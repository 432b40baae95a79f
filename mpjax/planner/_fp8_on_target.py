"""FP8 policies as a target would run them, whatever units this machine has."""

from __future__ import annotations

import dataclasses
import types

from mpjax.fp8._hardware import fp8_units
from mpjax.planner._targets import Target
from mpjax.policy import Policy


def policy_on_target(policy: Policy, target: Target) -> tuple[Policy, str]:
  """Returns the policy as the target would run it, whatever this machine has, and a note or nothing."""
  recipe = policy.fp8
  if recipe is None or recipe.emulate or target.is_here:
    return policy, ""
  major, minor = target.compute_capability
  device = types.SimpleNamespace(
    platform=target.kind, device_kind=target.device, compute_capability=f"{major}.{minor}"
  )
  there, why = fp8_units(recipe, device)
  if not there:
    return dataclasses.replace(policy, fp8=None), f"{why}: products run in {policy.compute_dtype.name}"
  # Its products are to be traced as FP8 on this machine, too; which kernels they become the target decides.
  return dataclasses.replace(policy, fp8=dataclasses.replace(recipe, emulate=True)), ""
