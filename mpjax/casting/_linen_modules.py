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
from typing import Any

import jax

from mpjax._types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InOwnDtypes:
  """Variables in the output of a function under autocast; the policy's output dtype does not apply."""

  tree: PyTree


def bound_module(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Returns the first linen module of a call that is bound to a scope; `None` without one.

  Args:
    fun: the function: a module, a method of one, or a function that takes modules.
    args: the positional arguments of the call.
    kwargs: the keyword arguments of the call.
  """
  if "flax.linen" not in sys.modules:
    return None
  if isinstance(fun, functools.partial):
    return bound_module(fun.func, (*fun.args, *args), {**fun.keywords, **kwargs})
  return next(filter(_is_bound, [fun, _owner(fun), *jax.tree.leaves((args, kwargs))]), None)


def with_variables(
  transform: Callable[[Callable[..., Any]], Callable[..., Any]],
  module: Any,
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> Any:
  """Returns the result of a function with a bound module under a transform, and keeps its new variables.

  Args:
    transform: takes a function of arrays that returns a value, and variables as `InOwnDtypes`.
    module: the module from `bound_module`.
    fun: the function.
    args: the positional arguments of the call.
    kwargs: the keyword arguments of the call.
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

  method, args, kwargs = _as_method(module, fun, args, kwargs)
  return transforms.lift_transform(lifted, method)(module, *args, **kwargs)


def _owner(fun: object) -> Any:
  """Returns the object whose method, of its own class, a function is; `None` for linen's own methods."""
  if not isinstance(fun, types.MethodType):
    return None
  is_linens_own = getattr(sys.modules["flax.linen"].Module, fun.__name__, None) is fun.__func__
  return None if is_linens_own else fun.__self__


def _is_bound(x: object) -> bool:
  return isinstance(x, sys.modules["flax.linen"].Module) and getattr(x, "scope", None) is not None


def _as_method(
  module: Any, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
  """Returns a function whose first argument is the module, and its other arguments."""
  if isinstance(fun, functools.partial):
    return _as_method(module, fun.func, (*fun.args, *args), {**fun.keywords, **kwargs})
  if fun is module:
    return type(module).__call__, args, kwargs
  if isinstance(fun, types.MethodType) and _owner(fun) is module:
    return fun.__func__, args, kwargs
  if args and args[0] is module:
    return fun, args[1:], kwargs
  return (lambda _, *args, **kwargs: fun(*args, **kwargs)), args, kwargs
