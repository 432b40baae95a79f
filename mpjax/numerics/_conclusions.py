"""Conclusions of an inspection: findings, a policy to use instead, and that policy's effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True)
class Finding:
  """An effect of low precision.

  Attributes:
    kind: `overflow`, `gradient overflow`, `underflow`, `nonfinite`, `lost updates`, `error`,
      `gradient error`, `weight gradient`, `stored state`, `loss scale`, `descent`, `bias`, `range` or
      `fragile`.
    severity: `problem`, or `note` for an effect that does no harm now.
    module: module path, a parameter's tree path, or a slot of the optimiser's state; empty for the step.
    text: one or two sentences that say what was measured.
  """

  kind: str
  severity: str
  module: str
  text: str


@dataclasses.dataclass(frozen=True)
class Measured:
  """The measured effect of the advice.

  Attributes:
    what: name of the figure.
    before: its value under the policy.
    after: its value under the advised policy.
  """

  what: str
  before: float
  after: float


@dataclasses.dataclass(frozen=True)
class Advice:
  """A policy to use instead.

  Attributes:
    policy: the policy, as `mpjax.get_policy` takes it.
    lines: (key, its benefit) for each change.
    measured: figures before and after, if the policy was tried.
    left: problems that remained when the policy was tried.
  """

  policy: Mapping[str, Any]
  lines: tuple[tuple[str, str], ...] = ()
  measured: tuple[Measured, ...] = ()
  left: tuple[Finding, ...] = ()

  @property
  def unchanged(self) -> bool:
    """Returns whether there is nothing to change."""
    return not self.lines

  @property
  def yaml(self) -> str:
    """Returns the `policy` key of a config, ready to paste."""
    return yaml.safe_dump({"policy": dict(self.policy)}, sort_keys=False, default_flow_style=False)
