"""Module paths, and the per-module settings that they select."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.fp8 import Recipe
from mpjax.fp8._hardware import on_device
from mpjax.jaxpr import FULL_PRECISION, without_marks
from mpjax.patterns import component_regex
from mpjax.policy import Override, Policy, parse_overrides


class Overrides:
  """The settings of each module: the policy's, changed by the first override that matches.

  A regex must match whole components of the path, anywhere in it: `head` matches `GPT/head` and the paths
  below it, not `GPT/header`.

  Args:
    policy: its settings apply if no override matches, and its own overrides come last.
    overrides: more overrides, tried first; what `mpjax.policy.parse_overrides` takes, or `None`.
  """

  def __init__(self, policy: Policy, overrides: Mapping[str, Any] | None):
    dtype = policy.compute_dtype if policy.compute_dtype.itemsize <= 4 else np.dtype("float32")
    self._default = Override(dtype, policy.fp8 is not None and dtype.itemsize == 2)
    self._asked = policy.fp8 or Recipe()
    self._rules = [
      (pattern, component_regex(pattern), self._completed(override))
      for pattern, override in [*parse_overrides(overrides or ()), *policy.overrides]
    ]
    self._resolved: dict[str, Override] = {}
    self._matched: set[str] = set()

  @functools.cached_property
  def _recipe(self) -> Recipe:
    """The policy's recipe; `auto` is what it is on this device."""
    return on_device(self._asked)

  @property
  def key(self) -> Hashable:
    """A key that is equal for overrides with the same choices."""
    return self._default, self._asked, tuple((pattern, settings) for pattern, _, settings in self._rules)

  @property
  def nothing_to_do(self) -> bool:
    """Whether everything computes in float32, whatever the paths."""
    return _half(self._default) is None and not self._rules

  @functools.cached_property
  def any_half(self) -> np.dtype:
    """A half dtype that is in use, bfloat16 if none is."""
    return next((half for half in self.halves if half is not None), np.dtype(jnp.bfloat16))

  @property
  def halves(self) -> list[np.dtype | None]:
    """The half dtypes in use, each once, in the order of the settings; `None` for float32."""
    return list(dict.fromkeys(map(_half, self._settings)))

  @property
  def recipes(self) -> set[Recipe]:
    """The FP8 recipes in use: none, or the policy's."""
    return {self._recipe} if any(settings.fp8 for settings in self._settings) else set()

  @property
  def has_histories(self) -> bool:
    """Whether products may have histories of delayed scaling; asks no device."""
    return self._asked.recipe == "delayed" and any(settings.fp8 for settings in self._settings)

  def half_at(self, path: str) -> np.dtype | None:
    """Returns the half dtype that a module computes in; `None` for float32."""
    return _half(self._at(path))

  def is_set(self, path: str) -> bool:
    """Returns whether an override matches a module."""
    return self._at(path) is not self._default

  def recipe_at(self, path: str) -> Recipe | None:
    """Returns the FP8 recipe of a module's matrix products; `None` for none."""
    return self._recipe if self._at(path).fp8 else None

  def loop_carry_at(self, path: str) -> str | None:
    """Returns the dtype setting for the carries of a module's loops, as `Override.loop_carry`."""
    return self._at(path).loop_carry

  def recompute_at(self, path: str) -> str | None:
    """Returns what the backward pass recomputes of a module, as `Override.recompute`."""
    return self._at(path).recompute

  def uniform_below(self, path: str) -> bool:
    """Returns whether everything below a path in float32 is float32, too."""
    return FULL_PRECISION in path.split("/") or all(_half(settings) is None for _, _, settings in self._rules)

  def check_all_matched(self) -> None:
    """Raises `ValueError` for a regex that matched no path, and lists the paths."""
    for pattern, *_ in self._rules:
      if pattern not in self._matched:
        paths = sorted({without_marks(path) for path in self._resolved} - {""})
        shown = ", ".join(paths[:40]) + (f", and {len(paths) - 40} more" if len(paths) > 40 else "")
        raise ValueError(
          f"policy override {pattern!r} matches no module path; paths: "
          + (shown or "none: name regions with jax.named_scope, or pass an nnx.Module as an argument")
        )

  @property
  def _settings(self) -> list[Override]:
    return [self._default, *(settings for _, _, settings in self._rules)]

  def _completed(self, override: Override) -> Override:
    """Returns the override, with the policy's settings for the fields that it leaves out."""
    changes = {key: value for key, value in vars(override).items() if value is not None}
    return dataclasses.replace(self._default, **changes)

  def _at(self, path: str) -> Override:
    if path not in self._resolved:
      found = [
        (pattern, settings) for pattern, regex, settings in self._rules if regex.search(without_marks(path))
      ]
      self._matched |= {pattern for pattern, _ in found}
      settings = found[0][1] if found else self._default
      self._resolved[path] = _IN_FULL_PRECISION if FULL_PRECISION in path.split("/") else settings
    return self._resolved[path]


_IN_FULL_PRECISION = Override(np.dtype("float32"))


def _half(settings: Override) -> np.dtype | None:
  dtype = settings.compute_dtype
  return None if dtype is None or dtype.itemsize >= 4 else dtype
