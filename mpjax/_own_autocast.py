"""What `autocast` has made a function of, for the tools that look inside and for a user's own loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mpjax._types import PolicyLike
from mpjax.policy import Policy, get_policy

_ATTRIBUTE = "_autocast_"


class _NotGiven(str):
  """The policy of a call that names none: the same string, distinguished by its type."""


AUTO = _NotGiven("auto")


class OwnAutocast(NamedTuple):
  """What a function that `autocast` returned was made of.

  Attributes:
    wrapped: the function that `autocast` returned.
    fun: the function that it was given.
    policy: its policy.
    ops: its `OpLists`, or `None`.
    overrides: its overrides.
    recompute: what it recomputes.
  """

  wrapped: weakref.ref[Callable[..., Any]]
  fun: Callable[..., Any]
  policy: PolicyLike
  ops: Any
  overrides: Mapping[str, PolicyLike] | None
  recompute: str

  def put_on(self, wrapped: Callable[..., Any]) -> None:
    """Leaves this on the function that `autocast` returns."""
    setattr(wrapped, _ATTRIBUTE, self)


def autocast_within(fun: Callable[..., Any]) -> OwnAutocast | None:
  """Returns what `autocast` has left on a function, also on a wrapper of it, which copies attributes."""
  own = getattr(fun, _ATTRIBUTE, None)
  return own if isinstance(own, OwnAutocast) else None


def own_autocast(fun: Callable[..., Any]) -> OwnAutocast | None:
  """Returns what a function was made of if `autocast` returned it, or a `jax.jit` of what it returned."""
  fun = getattr(fun, "__wrapped__", fun) if isinstance(fun, jax.stages.Wrapped) else fun
  own = autocast_within(fun)
  return own if own is not None and own.wrapped() is fun else None


def require_no_autocast(fun: Callable[..., Any], policy: Policy) -> None:
  """Raises `ValueError` for a policy with a function that `autocast` returned, which it would not change."""
  own = own_autocast(fun)
  if own is not None:
    raise ValueError(
      f"the function has an autocast of its own, policy {get_policy(own.policy).label}, which policy "
      f"{policy.label} does not change: pass the function without its autocast, or no policy"
    )
