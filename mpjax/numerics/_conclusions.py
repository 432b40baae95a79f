"""Conclusions of an inspection: findings, a policy to use instead, and the effect of that policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something that low precision did.

  Attributes:
    kind: `overflow`, `gradient overflow`, `underflow`, `nonfinite`, `lost updates`, `error`,
      `gradient error`, `weight gradient`, `stored state`, `loss scale`, `descent`, `bias`, `range` or
      `fragile`.
    severity: `problem`, or `note` for what does no harm as it is.
    module: module path, a parameter's tree path, or a slot of the optimiser's state; empty for the whole.
    text: what was seen, in a sentence or two.
  """

  kind: str
  severity: str
  module: str
  text: str


@dataclasses.dataclass(frozen=True)
class Measured:
  """The measured effect of the advice.

  Attributes:
    what: the figure.
    before: under the policy.
    after: under the advised one.
  """

  what: str
  before: float
  after: float


@dataclasses.dataclass(frozen=True)
class Advice:
  """A policy to use instead.

  Attributes:
    policy: as `mpjax.get_policy` takes it.
    lines: (key, what it buys) for each change.
    measured: figures before and after, where the policy was tried.
    left: problems that were still there when it was tried.
  """

  policy: Mapping[str, Any]
  lines: tuple[tuple[str, str], ...] = ()
  measured: tuple[Measured, ...] = ()
  left: tuple[Finding, ...] = ()

  @property
  def unchanged(self) -> bool:
    """Returns whether the policy is good as it is."""
    return not self.lines

  @property
  def yaml(self) -> str:
    """Returns the `policy` key of a config, to paste."""
    return yaml.safe_dump({"policy": dict(self.policy)}, sort_keys=False, default_flow_style=False)
