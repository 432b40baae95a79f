"""From findings to a policy: what to change, and the benefit of each change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from mpjax._render.plain_text import percent, power_of_two_text
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._report import NumericsReport
from mpjax.numerics.advice import _findings as seen
from mpjax.patterns import component_regex
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
      if self.value is None:
        return "loss_scaling: none"
      return f"loss_scaling: {self.value['kind']}, init_scale {power_of_two_text(self.value['init_scale'])}"
    return f"{self.key}: {self.value}".replace("True", "true").replace("None", "none")


def with_conclusions(report: NumericsReport, advise: bool) -> NumericsReport:
  """Returns a report with its findings, and if `advise` with a policy that should fix the problems."""
  findings = seen.find(report)
  if not advise:
    return dataclasses.replace(report, findings=findings)
  changes = _changes(report, findings)
  advice = Advice(_spec(report.policy, changes), tuple((str(change), change.buys) for change in changes))
  return dataclasses.replace(report, findings=findings, advice=advice)


def _changes(report: NumericsReport, findings: Iterable[Finding]) -> list[Change]:
  """Returns the changes that the problems of a report ask for."""
  kinds = {f.kind for f in findings if f.severity == "problem"}
  changes: list[Change] = []
  if "lost updates" in kinds:
    changes += _master_weights(report)
  changes += _loss_scale(report, findings)
  overrides = _overrides(report, findings)
  if overrides and not report.policy.autocast:
    changes.append(
      Change("autocast", True, "precision by module, and float32 where range or digits are critical")
    )
    if report.policy.param_dtype.itemsize < 4 and all(c.key != "param_dtype" for c in changes):
      buys = "autocast takes float32 weights, which serve as master weights"
      changes = [c for c in changes if c.key != "master_weights"]
      changes.append(Change("param_dtype", "float32", buys))
      if report.policy.master_weights is not None:
        changes.append(Change("master_weights", None, "float32 weights do not need them"))
    if report.policy.output_dtype.itemsize < 4:
      changes.append(Change("output_dtype", "float32", "the loss keeps its digits"))
  return changes + overrides


def _master_weights(report: NumericsReport) -> list[Change]:
  """Returns changes after which the weights take the updates that are lost now."""
  worst = seen.stalled(report)
  if not worst:
    buys = "the optimiser computes in float32, where its divisions are safe"
    return [Change("param_dtype", "float32", buys)]
  shares = ", ".join(f"{t.path} {percent(t.lost_here)}" for t in worst[:3])
  more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
  buys = f"master weights take the updates that are lost now: {shares}{more}"
  if report.policy.param_dtype.name == "bfloat16":
    lost = max((t.lost or {})["int8"] for t in worst)
    buys += (
      "; bfloat16 weights take them too, with master_weights: int16, or int8 (3 bytes a weight instead of "
    )
    buys += f"4; loses {percent(lost)})"
  return [Change("param_dtype", "float32", buys)]


def _loss_scale(report: NumericsReport, findings: Iterable[Finding]) -> list[Change]:
  """Returns a better loss scale, if gradients underflow or overflow under the present one."""
  if report.own_scale:
    return []
  problems = [f for f in findings if f.severity == "problem"]
  small = any(f.kind == "underflow" for f in problems)
  large = any(f.kind == "gradient overflow" for f in problems)
  low, high = seen.scale_limits(report)
  now = report.loss_scale
  if high is None or not ((small and high > now) or (large and high < now)):
    return []
  lost = lambda scale: percent(report.lost("activation gradient", "float16", scale))
  why = f"keeps {percent(report.keep)} of the gradients" if low else "is the largest without an overflow"
  buys = f"{power_of_two_text(high)} {why}: {lost(high)} of them underflow to zero in float16, "
  buys += f"{lost(now)} at {power_of_two_text(now)}"
  return [Change("loss_scaling", {"kind": "dynamic", "init_scale": high}, buys)]


def _overrides(report: NumericsReport, findings: Iterable[Finding]) -> list[Change]:
  """Returns wider formats for the modules that need them."""
  first = "bf16" if report.policy.compute_dtype.name == "float16" else "fp32"
  wanted: dict[str, tuple[str, str]] = {}
  scopes = {t.module: t.scope for t in report.tensors}
  _, high = seen.scale_limits(report)
  for f in findings:
    if f.severity != "problem":
      continue
    if f.kind == "overflow":
      # bfloat16 has float32's range, and matrix units multiply it as fast as float16.
      wanted.setdefault(scopes.get(f.module, f.module), (first, "its values stay finite"))
    elif f.kind == "gradient overflow" and (report.own_scale or not high):
      wanted.setdefault(scopes.get(f.module, f.module), (first, "its gradients stay finite"))
    elif f.kind == "error":
      wanted[scopes.get(f.module, f.module)] = (
        "bf16" if report.policy.fp8 else "fp32",
        "its values come close to float32's",
      )
    elif f.kind == "gradient error":
      # Often the cause is float16's subnormal numbers, which have few digits.
      wanted[scopes.get(f.module, f.module)] = (
        "bf16" if report.policy.fp8 else first,
        "its gradients come close to float32's",
      )
  best = report.loss_scale if report.own_scale else max(high or 1.0, report.loss_scale)
  for t in seen.harmful_underflows(report, best):
    scale = "the optimiser's loss scale" if report.own_scale else "any loss scale"
    wanted.setdefault(t.scope, (first, f"its gradients are too small for {scale}"))
  changes = []
  for pattern, module in _patterns(list(wanted), report).items():
    policy, buys = wanted[module]
    changes.append(Change("overrides", (pattern, policy), buys))
  return changes


def _patterns(modules: list[str], report: NumericsReport) -> dict[str, str]:
  """Returns override patterns, each with one of its modules; layers that are alike share a pattern."""
  everything = {t.scope for t in report.of("activation")}
  patterns: dict[str, str] = {}
  for module in modules:
    alike = {m for m in everything if _numberless(m) == _numberless(module)}
    together = len(alike) > 1 and alike <= set(modules)
    regex = re.sub(r"\d+", r"\\d+", module) if together else re.escape(module).replace(r"\-", "-")
    # Does not match submodules if values inside the module are observed, too.
    inside = not module or any(other.startswith(f"{module}/") for other in everything)
    regex = regex or "^"
    meant = set(alike) if together else {module}
    if any(component_regex(regex).search(m) and not _is_in(m, meant) for m in everything):
      regex = f"^{regex}"
    patterns.setdefault(f"{regex}$" if inside else regex, module)
  return patterns


def _is_in(path: str, modules: set[str]) -> bool:
  return any(path == module or path.startswith(f"{module}/") for module in modules)


def _numberless(module: str) -> str:
  return re.sub(r"\d+", "*", module)


def _spec(policy: Policy, changes: Iterable[Change]) -> dict[str, Any]:
  """Returns a changed policy as `get_policy` takes it: the nearest preset and the differences from it."""
  fields = {change.key: change.value for change in changes if change.key != "overrides"}
  overrides = [list(change.value) for change in changes if change.key == "overrides"]
  overrides += policy.to_dict()["overrides"]
  spec = as_changes(get_policy({"base": policy, **fields, "overrides": overrides}))
  return spec | {"overrides": overrides} if overrides else spec
