"""Errors for calls that do not fit: they show the right call, with the names of the user's own function."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._types import PyTree
from mpjax.policy import get_policy

_ONE_VALUE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def require_call(
  tool: str,
  looked_at: object,
  args: Sequence[Any],
  kwargs: Mapping[str, Any] | None = None,
  *,
  how: str = ", policy='bf16'",
) -> None:
  """Raises `TypeError` unless a tool was called as `tool(fun, *args, policy=...)`, and `fun` takes `args`.

  Args:
    tool: the public name of the tool, such as `"explain"`.
    looked_at: its first argument.
    args: the positional arguments after it.
    kwargs: keyword arguments for the function.
    how: the end of the call that the message shows, after the arguments.
  """
  shown = _shown(tool, looked_at, how)
  if isinstance(looked_at, (str, jmp.Policy)) or not callable(looked_at):
    raise TypeError(f"mpjax.{tool} got a {type(looked_at).__name__}: expected a function; call {shown}")
  if is_linen_module(looked_at):
    raise TypeError(
      f"mpjax.{tool} got the linen module {type(looked_at).__name__}, which holds no parameters: call "
      f"mpjax.{tool}(model.apply, variables, x{how})"
    )
  fits = misfit(looked_at, args, kwargs or {})
  if any(map(is_policy, args)) and (fits or len(args) == 1):
    raise TypeError(f"mpjax.{tool} takes a policy by keyword: call {shown}")
  if fits:
    as_one = len(args) == 1 and isinstance(args[0], (tuple, list))
    way = ", with its arguments one by one instead of a tuple" if as_one else ""
    raise TypeError(f"mpjax.{tool}: {fits}: call {shown}{way}")


def misfit(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
  """Returns why a function cannot be called with these arguments; empty if it can, or if it is unknown.

  A wrapper may have the signature of the function it wraps and pass some arguments itself: one signature
  that fits is enough.
  """
  why = ""
  for follow in (True, False):
    try:
      inspect.signature(fun, follow_wrapped=follow).bind(*args, **kwargs)
    except ValueError:
      return ""
    except TypeError as error:
      why = why or str(error)
    else:
      return ""
  return why


def refuse_keywords(fun: Callable[..., Any], given: Mapping[str, Any], instead: Mapping[str, str]) -> None:
  """Raises `TypeError` for keyword arguments that a public function does not have, with the way out.

  Args:
    fun: the function.
    given: the arguments that it does not have.
    instead: from other libraries' names of arguments to the way to write them here.
  """
  for name in given:
    hint = instead.get(name)
    if hint is None:
      known = [key for key, p in inspect.signature(fun).parameters.items() if p.kind != p.VAR_KEYWORD]
      near = difflib.get_close_matches(name, known, 1)
      hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    raise TypeError(f"mpjax.{fun.__name__} has no argument {name!r}: {hint}")


def require_transform(name: str, inner: object, call: str) -> None:
  """Raises `TypeError` if a wrapper of optax transforms gets something else.

  Args:
    name: the public name of the wrapper.
    inner: its argument.
    call: the right call.
  """
  if not (hasattr(inner, "init") and hasattr(inner, "update")):
    raise TypeError(f"mpjax.{name} got a {type(inner).__name__}: expected an optax transform; call {call}")


def require_arrays_only(params: PyTree) -> None:
  """Raises `TypeError` for parameters that include functions, as an Equinox module does."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if callable(leaf) and not hasattr(leaf, "dtype"):
      raise TypeError(
        f"the parameters hold a function at {jax.tree_util.keystr(path)}: pass only the arrays, as in "
        "params, static = eqx.partition(model, eqx.is_inexact_array); mpjax.make_train_step takes the whole "
        "module"
      )


def is_policy(x: object) -> bool:
  """Returns whether an argument is meant as a policy: a `Policy`, its name, or a half-precision dtype."""
  if isinstance(x, jmp.Policy):
    return True
  if isinstance(x, (type, np.dtype)):
    return x in (jnp.bfloat16, jnp.float16, np.dtype(jnp.bfloat16), np.dtype(np.float16))
  if not isinstance(x, str):
    return False
  try:
    get_policy(x)
  except ValueError:
    return False
  return True


def is_linen_module(x: object) -> bool:
  """Returns whether an object is a `flax.linen.Module` without variables; does not import flax."""
  linen = sys.modules.get("flax.linen")
  return linen is not None and isinstance(x, linen.Module) and x.scope is None


def _shown(tool: str, looked_at: object, how: str) -> str:
  """Returns the right call of a tool."""
  name = getattr(looked_at, "__name__", "loss_fn")
  name = name if name.isidentifier() else "f"
  try:
    parameters = inspect.signature(looked_at).parameters if callable(looked_at) else {}
  except (TypeError, ValueError):
    parameters = {}
  wanted = [key for key, p in parameters.items() if p.kind in _ONE_VALUE and p.default is p.empty]
  args = wanted or (["*args"] if callable(looked_at) else ["params", "batch"])
  return f"mpjax.{tool}({', '.join([name, *args])}{how})"
