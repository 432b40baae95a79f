"""Conclusions of an inspection: findings, and a policy to use instead."""

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
      `gradient error`, `weight gradient`, `descent`, `bias`, `range`, `reference` or `fragile`.
    severity: `problem`, or `note` for an effect that does no harm now.
    module: module path or a parameter's tree path; empty for the step.
    text: one or two sentences that say what was measured.
    tensor: the parameter's tree path, or the tensor's name; empty for the step.
    order: position in the program; -1 for the step, and for a parameter that is not finite.
  """

  kind: str
  severity: str
  module: str
  text: str
  tensor: str = ""
  order: int = -1


@dataclasses.dataclass(frozen=True)
class Advice:
  """A policy to use instead, as the findings suggest it; `mpjax.tune` measures it.

  Attributes:
    policy: the policy, as `mpjax.get_policy` takes it.
    lines: (key, its benefit) for each change.
  """

  policy: Mapping[str, Any]
  lines: tuple[tuple[str, str], ...] = ()

  @property
  def unchanged(self) -> bool:
    """Returns whether there is nothing to change."""
    return not self.lines

  @property
  def yaml(self) -> str:
    """Returns the `policy` key of a config, ready to paste."""
    return yaml.safe_dump({"policy": dict(self.policy)}, sort_keys=False, default_flow_style=False)
