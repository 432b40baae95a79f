"""Errors for calls that do not fit: they show the right call, with the names of the user's own function."""

from __future__ import annotations

import difflib
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._types import PyTree
from mpjax.policy import get_policy

# Warnings with these names show the user's line. Before Python 3.12, which counts frames, they show their
# own.
AT_THE_USER: dict[str, Any] = (
  {
    "skip_file_prefixes": tuple(
      str(pathlib.Path(str(m.__file__)).parent) for m in (jax, sys.modules["mpjax"])
    )
  }
  if sys.version_info >= (3, 12)
  else {"stacklevel": 1}
)
_ONE_VALUE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def require_call(
  tool: str,
  looked_at: object,
  args: Sequence[Any],
  kwargs: Mapping[str, Any] | None = None,
  *,
  how: str = ", policy='bf16'",
  linen: str = "mpjax.{tool}(model.apply, variables, x{how})",
) -> None:
  """Raises `TypeError` unless a tool was called as `tool(fun, *args, policy=...)`, and `fun` takes `args`.

  Args:
    tool: the public name of the tool, such as `"explain"`.
    looked_at: its first argument.
    args: the positional arguments after it.
    kwargs: keyword arguments for the function.
    how: the end of the call that the message shows, after the arguments.
    linen: the call for the parameters of a linen module.
  """
  kwargs = kwargs or {}
  shown = _shown(tool, looked_at, kwargs) + f"{how})"
  if isinstance(looked_at, (str, jmp.Policy)) or not callable(looked_at):
    raise TypeError(f"mpjax.{tool} got a {type(looked_at).__name__}: expected a function; call {shown}")
  if is_linen_module(looked_at):
    raise TypeError(
      f"mpjax.{tool} got the linen module {type(looked_at).__name__}, which holds no parameters: call "
      + linen.format(tool=tool, how=how)
    )
  fits = misfit(looked_at, args, kwargs)
  # A wrapper that takes anything, as that of `jax.grad`, does not tell what it passes on.
  meant = fits or misfit(looked_at, args, kwargs, loosely=False)
  if any(map(is_policy, args)) and (meant or len(args) == 1):
    raise TypeError(
      f"mpjax.{tool} takes a policy by keyword: call {_shown(tool, looked_at, kwargs)}, policy='bf16')"
    )
  as_one = len(args) == 1 and isinstance(args[0], (tuple, list))
  if fits or (meant and as_one):
    way = ", with its arguments one by one instead of a tuple" if as_one else ""
    raise TypeError(f"mpjax.{tool}: {meant}: call {shown}{way}")


def misfit(
  fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, loosely: bool = True
) -> str:
  """Returns why a function cannot be called with these arguments; empty if it can, or if it is unknown.

  A wrapper may have the signature of the function it wraps and pass some arguments itself: one signature
  of the chain that fits is enough.

  Args:
    fun: the function.
    args: positional arguments.
    kwargs: keyword arguments.
    loosely: whether a wrapper that takes any arguments fits.
  """
  why = ""
  each: Any = fun
  while each is not None:
    inner = getattr(each, "__wrapped__", None)
    try:
      signature = inspect.signature(each, follow_wrapped=False)
    except (TypeError, ValueError):
      return ""
    takes_any = any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values())
    if loosely or inner is None or not takes_any:
      try:
        signature.bind(*args, **kwargs)
      except TypeError as error:
        why = why or str(error)
      else:
        return ""
    each = inner
  return why


def refuse_keywords(fun: Callable[..., Any], given: Mapping[str, Any], instead: Mapping[str, str]) -> None:
  """Raises `TypeError` for keyword arguments that a public function does not have, with the way out.

  Args:
    fun: the function.
    given: the arguments that it does not have.
    instead: from other libraries' names of arguments, with spaces between them, to the way to write them
      here.
  """
  for name in given:
    hint = next((way for names, way in instead.items() if name in names.split()), None)
    if hint is not None and is_policy(given[name]):
      hint = hint.replace("'bf16'", f"'{_preset_of(given[name])}'")
    if hint is None:
      parameters = inspect.signature(fun).parameters.values()
      known = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
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
  """Raises `TypeError` for a linen module, or parameters that include functions, as an Equinox module."""
  if is_linen_module(params):
    raise TypeError(
      f"the linen module {type(params).__name__} holds no parameters: pass model.init(key, x)['params']"
    )
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


def _preset_of(asked: Any) -> str:
  """Returns the preset that a dtype or a name is probably meant as: `bf16` or `fp16` for the bare dtypes."""
  policy = get_policy(asked)
  bare = {"float16": "fp16", "bfloat16": "bf16"}
  return str(bare.get(policy.compute_dtype.name, policy.label)) if policy.fp8 is None else policy.label


def _shown(tool: str, looked_at: object, kwargs: Mapping[str, Any]) -> str:
  """Returns the right call of a tool without its end, with the names of the user's own function."""
  name = getattr(looked_at, "__name__", "loss_fn")
  name = name if name.isidentifier() else "f"
  try:
    parameters = inspect.signature(looked_at).parameters if callable(looked_at) else {}
  except (TypeError, ValueError):
    parameters = {}
  wanted = [
    key
    for key, p in parameters.items()
    if p.kind in _ONE_VALUE and p.default is p.empty and key not in kwargs
  ]
  args = wanted or (["*args"] if callable(looked_at) else ["params", "batch"])
  return f"mpjax.{tool}({', '.join([name, *args, *(f'{key}={key}' for key in kwargs)])}"
