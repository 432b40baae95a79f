"""Module paths, and the per-module policies that are chosen by them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.fp8._recipe import Recipe
from mpjax.patterns import component_regex
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
    self._recipe = policy.fp8_recipe
    self._rules = [
      (pattern, component_regex(pattern), *self._of(get_policy(spec)))
      for pattern, spec in [*parse_overrides(overrides or ()), *policy.overrides]
    ]
    self._default = self._of(policy)
    self._resolved: dict[str, tuple[np.dtype | None, Recipe | None]] = {}
    self._matched: set[str] = set()

  @property
  def nothing_to_do(self) -> bool:
    """Whether everything computes in float32, without a look at its paths."""
    return self._default == (None, None) and not self._rules

  @property
  def any_half(self) -> np.dtype:
    """A half dtype that is in use, bfloat16 if none is."""
    in_use = (self._default[0], *(dtype for _, _, dtype, _ in self._rules))
    return next((dtype for dtype in in_use if dtype is not None), np.dtype(jnp.bfloat16))

  @property
  def recipes(self) -> set[Recipe]:
    """The FP8 recipes in use."""
    return {recipe for recipe in (self._default[1], *(recipe for *_, recipe in self._rules)) if recipe}

  def half_at(self, path: str) -> np.dtype | None:
    """The half dtype that a module computes in, or `None` for float32."""
    return self._at(path)[0]

  def recipe_at(self, path: str) -> Recipe | None:
    """The FP8 recipe of a module's matrix products, or `None` for none."""
    return self._at(path)[1]

  def uniform_below(self, path: str) -> bool:
    """Whether a path in float32 can have nothing in half precision under it."""
    return FULL_PRECISION in path.split("/") or all(dtype is None for _, _, dtype, _ in self._rules)

  def _of(self, policy: Policy) -> tuple[np.dtype | None, Recipe | None]:
    """The half dtype and the recipe of a policy; an override's recipe is that of the whole policy."""
    return half_dtype(policy), policy.fp8_recipe and (self._recipe or policy.fp8_recipe)

  def _at(self, path: str) -> tuple[np.dtype | None, Recipe | None]:
    if path not in self._resolved:
      self._resolved[path] = self._resolve(path)
    return self._resolved[path]

  def _resolve(self, path: str) -> tuple[np.dtype | None, Recipe | None]:
    found = [(pattern, (half, recipe)) for pattern, regex, half, recipe in self._rules if regex.search(path)]
    self._matched |= {pattern for pattern, _ in found}
    if FULL_PRECISION in path.split("/"):
      return None, None
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
