"""Variables of linen modules go in and out of a function under autocast, its module or its arguments.

A linen module keeps its variables in a scope, which is a side effect for a trace. So a function with a
bound module is lifted, as `flax.linen.jit` lifts. Inside the trace the module is a copy with its own
scope, whose variables are arguments and results of the traced function. flax is imported only
for users of such a module.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpjax._types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InOwnDtypes:
  """Variables in the output of a function under autocast; the policy's output dtype does not apply."""

  tree: PyTree


class BoundCall(NamedTuple):
  """A call with a linen module that is bound to a scope, as a function whose first argument is the module."""

  module: Any
  method: Callable[..., Any]
  args: tuple[Any, ...]
  kwargs: dict[str, Any]


def bound_call(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall | None:
  """Returns a call of a bound linen module, a method of one, or a function that takes one; else `None`."""
  if "flax.linen" not in sys.modules:
    return None
  linen = sys.modules["flax.linen"].Module
  while isinstance(fun, functools.partial):
    fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
  is_method = isinstance(fun, types.MethodType)
  is_linens_own = is_method and getattr(linen, fun.__name__, None) is fun.__func__
  owner = fun.__self__ if is_method and not is_linens_own else None
  is_bound = lambda x: isinstance(x, linen) and getattr(x, "scope", None) is not None
  module = next(filter(is_bound, [fun, owner, *jax.tree.leaves((args, kwargs))]), None)
  if module is None:
    return None
  if fun is module:
    return BoundCall(module, type(module).__call__, args, kwargs)
  if owner is module:
    return BoundCall(module, fun.__func__, args, kwargs)
  if args and args[0] is module:
    return BoundCall(module, fun, args[1:], kwargs)
  return BoundCall(module, lambda _, *args, **kwargs: fun(*args, **kwargs), args, kwargs)


def with_variables(transform: Callable[[Callable[..., Any]], Callable[..., Any]], call: BoundCall) -> Any:
  """Returns the result of a call of a bound module under a transform, and keeps its new variables.

  The transform takes a function of arrays that returns a value, and variables as `InOwnDtypes`.
  """
  from flax.core import lift
  from flax.linen import transforms

  def lifted(core_fn: Callable[..., Any]) -> Callable[..., Any]:
    def inner(scope_of: Any, variables_of: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
      def flat(variables: Any, rngs: Any, args: Any, kwargs: Any) -> tuple[Any, InOwnDtypes]:
        scope = scope_of(variables, rngs)
        out = core_fn(scope, *args, **kwargs)
        return out, InOwnDtypes(variables_of(scope))

      out, made = transform(flat)(variables, rngs, args, kwargs)
      return out, made.tree

    return lift.pack(inner, (True,), (True,), (True,), name="autocast", enable_kwargs=True)

  return transforms.lift_transform(lifted, call.method)(call.module, *call.args, **call.kwargs)
