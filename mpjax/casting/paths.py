"""Module paths, and the per-module policies that are chosen by them."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.policy import Policy, get_policy, parse_overrides

# Scopes with which autocast marks a program for autocasts outside it.
FULL_PRECISION = "full_precision"
OUTPUT = "autocast_output"


def join(prefix: str, path: str) -> str:
  """A path inside another."""
  return f"{prefix}/{path}" if prefix and path else prefix or path


def half_dtype(policy: Policy) -> np.dtype | None:
  """The half dtype that a policy computes in, or `None` if it computes in float32 or wider."""
  return policy.compute_dtype if policy.compute_dtype.itemsize < 4 else None


class Overrides:
  """Policies by regular expression on the module path, and which of them matched.

  A regex has to match whole components of the path, anywhere in it: `head` matches `GPT/head` and what lies
  under it, not `GPT/header`. The first that matches wins.
  """

  def __init__(self, policy: Policy, overrides: Any):
    self._rules = [
      (pattern, re.compile(rf"(?:^|/)(?:{pattern})(?:/|$)"), half_dtype(get_policy(spec)))
      for pattern, spec in [*parse_overrides(overrides or ()), *policy.overrides]
    ]
    self._default = half_dtype(policy)
    self._resolved: dict[str, np.dtype | None] = {}
    self._matched: set[str] = set()

  @property
  def nothing_to_do(self) -> bool:
    """Whether everything computes in float32, without a look at its paths."""
    return self._default is None and not self._rules

  @property
  def any_half(self) -> np.dtype:
    """A half dtype that is in use, bfloat16 if none is."""
    in_use = (self._default, *(dtype for *_, dtype in self._rules))
    return next((dtype for dtype in in_use if dtype is not None), np.dtype(jnp.bfloat16))

  def half_at(self, path: str) -> np.dtype | None:
    """The half dtype that a module computes in, or `None` for float32."""
    if path not in self._resolved:
      self._resolved[path] = self._resolve(path)
    return self._resolved[path]

  def uniform_below(self, path: str) -> bool:
    """Whether a path in float32 can have nothing in half precision under it."""
    return FULL_PRECISION in path.split("/") or all(dtype is None for *_, dtype in self._rules)

  def _resolve(self, path: str) -> np.dtype | None:
    found = [(pattern, dtype) for pattern, regex, dtype in self._rules if regex.search(path)]
    self._matched |= {pattern for pattern, _ in found}
    if FULL_PRECISION in path.split("/"):
      return None
    return found[0][1] if found else self._default

  def check_all_matched(self) -> None:
    """Raises `ValueError` for a regex that matched no path, naming the paths there are."""
    for pattern, *_ in self._rules:
      if pattern not in self._matched:
        paths = sorted(path for path in self._resolved if path)
        shown = ", ".join(paths[:40]) + (f", and {len(paths) - 40} more" if len(paths) > 40 else "")
        raise ValueError(
          f"policy override {pattern!r} matches no module path; the paths are "
          + (shown or "none: name regions with jax.named_scope, or pass an nnx.Module as an argument")
        )
