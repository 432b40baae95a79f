"""From findings to a policy: what to change, and the benefit of each change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from mpjax._render.plain_text import percent, power_of_two_text
from mpjax.numerics import _rules as rules
from mpjax.numerics._report import Advice, NumericsReport
from mpjax.numerics._rules import Look
from mpjax.patterns import component_regex, layer_pattern
from mpjax.policy import Policy, as_changes, get_policy


class Change(NamedTuple):
  """A change of a policy.

  Attributes:
    key: key of the policy.
    value: its new value; for `overrides`, a (pattern, policy) pair that goes before the others.
    buys: benefit of the change, in words.
  """

  key: str
  value: Any
  buys: str

  def __str__(self) -> str:
    if self.key == "overrides":
      return f"overrides: {self.value[0]}: {self.value[1]}"
    if self.key == "loss_scaling":
      return f"loss_scaling: {self.value['kind']}, init_scale {power_of_two_text(self.value['init_scale'])}"
    return f"{self.key}: {self.value}".replace("True", "true").replace("None", "none")


def with_conclusions(report: NumericsReport, advise: bool) -> NumericsReport:
  """Returns a report with its findings, and if `advise` with a policy that should fix the problems."""
  look = Look(report)
  report = dataclasses.replace(report, findings=look.findings())
  if not advise:
    return report
  changes, overrides = [*_master_weights(look), *_loss_scale(look)], _overrides(look)
  if overrides and not report.policy.autocast:
    changes += _for_overrides(report.policy, changes)
  changes += overrides
  lines = tuple((str(change), change.buys) for change in changes)
  return dataclasses.replace(report, advice=Advice(_spec(report.policy, changes), lines))


def _master_weights(look: Look) -> list[Change]:
  """Returns a change after which the weights take the updates that are lost now."""
  paths = [finding.module for finding in look.problems(rules.lost_updates)]
  if not paths:
    buys = "the optimiser computes in float32, where its divisions are safe"
    return [Change("param_dtype", "float32", buys)] if look.problems(rules.broken_update) else []
  buys = "master weights take the updates that are lost now"
  if look.report.policy.param_dtype.name == "bfloat16":
    lost = percent(max((t.lost or {})["int8"] for t in look.report.of("update") if t.path in paths))
    corrections = f"int16, or int8 (3 bytes a weight instead of 4; loses {lost})"
    buys += f"; bfloat16 weights take them too, with master_weights: {corrections}"
  return [Change("param_dtype", "float32", buys)]


def _loss_scale(look: Look) -> list[Change]:
  """Returns a better loss scale, if gradients underflow or overflow under the present one."""
  report, (low, high) = look.report, look.scales
  now = report.loss_scale
  if report.own_scale or high is None:
    return []
  if not (
    (high > now and look.problems(rules.underflow)) or (high < now and look.problems(rules.gradient_overflow))
  ):
    return []
  lost = lambda scale: percent(report.lost("activation gradient", "float16", scale))
  why = f"keeps {percent(report.keep)} of the gradients" if low else "is the largest without an overflow"
  buys = f"{power_of_two_text(high)} {why}: {lost(high)} of them underflow to zero in float16"
  value = {"kind": "dynamic", "init_scale": high}
  return [Change("loss_scaling", value, f"{buys}, {lost(now)} at {power_of_two_text(now)}")]


def _for_overrides(policy: Policy, changes: list[Change]) -> list[Change]:
  """Returns what overrides need of a policy that computes in one dtype, after other changes."""
  why = "precision by module, and float32 where range or digits are critical"
  needs = [Change("autocast", True, why)]
  if policy.param_dtype.itemsize < 4 and all(change.key != "param_dtype" for change in changes):
    buys = "autocast takes float32 weights, which serve as master weights"
    needs.append(Change("param_dtype", "float32", buys))
    if policy.master_weights is not None:
      needs.append(Change("master_weights", None, "float32 weights do not need them"))
  if policy.output_dtype.itemsize < 4:
    needs.append(Change("output_dtype", "float32", "the loss keeps its digits"))
  return needs


def _overrides(look: Look) -> list[Change]:
  """Returns wider formats for the modules that need them."""
  report, high = look.report, look.scales[1]
  # bfloat16 has float32's range, and matrix units multiply it as fast as float16.
  wide = "bf16" if report.policy.compute_dtype.name == "float16" else "fp32"
  exact, normal = ("fp32", wide) if report.policy.fp8 is None else ("bf16", "bf16")
  best = report.loss_scale if report.own_scale else max(high or 1.0, report.loss_scale)
  at_best = Look(dataclasses.replace(report, loss_scale=best))
  scale = "the optimiser's loss scale" if report.own_scale else "any loss scale"
  gradient_overflows = [] if high and not report.own_scale else look.problems(rules.gradient_overflow)
  gradient_errors = look.problems(rules.gradient_error, rules.weight_gradient_error)
  wanted: dict[str, tuple[str, str]] = {}
  scopes = {t.module: t.scope for t in report.tensors}
  for findings, policy, buys in (
    (look.problems(rules.error), exact, "its values come close to float32's"),
    # Often the cause is float16's subnormal numbers, which have few digits.
    (gradient_errors, normal, "its gradients come close to float32's"),
    (look.problems(rules.overflow, rules.hidden_overflow), wide, "its values stay finite"),
    (gradient_overflows, wide, "its gradients stay finite"),
    (at_best.problems(rules.underflow), wide, f"its gradients are too small for {scale}"),
  ):
    for finding in findings:
      wanted.setdefault(scopes.get(finding.module, finding.module), (policy, buys))
  patterns = _patterns(list(wanted), report)
  return [Change("overrides", (pattern, wanted[m][0]), wanted[m][1]) for pattern, m in patterns.items()]


def _patterns(modules: list[str], report: NumericsReport) -> dict[str, str]:
  """Returns override patterns, each with one of its modules; layers that are alike share a pattern."""
  everything = {t.scope for t in report.of("activation")}
  patterns: dict[str, str] = {}
  for module in modules:
    alike = {m for m in everything if layer_pattern(m) == layer_pattern(module)}
    together = len(alike) > 1 and alike <= set(modules)
    regex = re.sub(r"\d+", r"\\d+", module) if together else re.escape(module).replace(r"\-", "-")
    # Does not match submodules if values inside the module are observed, too.
    inside = not module or any(other.startswith(f"{module}/") for other in everything)
    regex = regex or "^"
    meant = set(alike) if together else {module}
    others = {m for m in everything if not any(f"{m}/".startswith(f"{one}/") for one in meant)}
    if any(component_regex(regex).search(m) for m in others):
      regex = f"^{regex}"
    patterns.setdefault(f"{regex}$" if inside else regex, module)
  return patterns


def _spec(policy: Policy, changes: Iterable[Change]) -> dict[str, Any]:
  """Returns a changed policy as `get_policy` takes it: the nearest preset and the differences from it."""
  fields = {change.key: change.value for change in changes if change.key != "overrides"}
  overrides = [list(change.value) for change in changes if change.key == "overrides"]
  overrides += policy.to_dict()["overrides"]
  spec = as_changes(get_policy({"base": policy, **fields, "overrides": overrides}))
  return spec | {"overrides": overrides} if overrides else spec
