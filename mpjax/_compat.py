"""The one place that knows which JAX runs and how mpjax is installed."""

from __future__ import annotations

import contextlib
import importlib.resources
import pathlib
import sys
import types
from collections.abc import Callable
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
import optax


def preset_dir() -> Traversable:
  """The folder of policy presets: inside an installed wheel, or `configs/policies` in a checkout."""
  inside = importlib.resources.files("mpjax").joinpath("presets")
  return inside if inside.is_dir() else pathlib.Path(__file__).parent.parent / "configs" / "policies"


def is_array(leaf: Any) -> bool:
  """Whether JAX can trace `leaf` as an array: not so for `float0`."""
  if isinstance(leaf, (bool, int, float, complex)):
    return True
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0


def is_variable(atom: Any) -> bool:
  """Whether a jaxpr's atom is a variable, and not a literal."""
  return not isinstance(atom, jax.extend.core.Literal)


def eval_jaxpr(closed: Any, at_definition: Callable[[Any, Any], Any]) -> list[Any]:
  """Evaluates a closed jaxpr without arguments, each value replaced by what `at_definition` makes of it.

  Args:
    closed: what `jax.make_jaxpr(f)()` returns.
    at_definition: (variable, value) -> value that every later equation reads.
  """
  environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  read = lambda atom: environment[atom] if is_variable(atom) else atom.val
  for equation in closed.jaxpr.eqns:
    parameters = equation.primitive.get_bind_params(equation.params)
    scope = str(equation.source_info.name_stack)
    with equation.ctx.manager, jax.named_scope(scope) if scope else contextlib.nullcontext():
      out = equation.primitive.bind(*map(read, equation.invars), **parameters)
    for variable, value in zip(
      equation.outvars, out if equation.primitive.multiple_results else [out], strict=True
    ):
      environment[variable] = at_definition(variable, value)
  return [read(atom) for atom in closed.jaxpr.outvars]


class MultiStepsOutside(NamedTuple):
  """An `optax.MultiSteps` that calls; whether it has a rule by which it may drop gradients."""

  may_skip: bool


def multi_steps_outside(guard: types.CodeType) -> MultiStepsOutside | None:
  """The `optax.MultiSteps` from whose `update` this is called, at any depth; `None` if there is none.

  optax passes a wrapped transform no word of its wrapper, so the call stack is asked. One that is itself
  called from `guard`, at least twice on the stack then, is protected by that.
  """
  found = None
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None:
    if frame.f_code is optax.MultiSteps.update.__code__:
      rule = getattr(frame.f_locals["self"], "_should_skip_update_fn", None)
      default = getattr(rule, "__qualname__", "MultiSteps.").startswith("MultiSteps.")
      found = MultiStepsOutside(may_skip=not default)
    elif found is not None and frame.f_code is guard:
      return None
    frame = frame.f_back
  return found


def vary_like(tree: Any, like: Any) -> Any:
  """`tree` marked as varying over the `shard_map` axes that `like` varies over; elsewhere as it is."""
  axes = varying_axes(like)

  def leaf(x: Any) -> Any:
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(leaf, tree) if axes else tree


def varying_axes(tree: Any) -> frozenset[str]:
  """The `shard_map` axes that a leaf of `tree` is known to vary over: none where that is not tracked."""
  axes: frozenset[str] = frozenset()
  for leaf in jax.tree.leaves(tree):
    kind = jax.typeof(leaf)
    if hasattr(kind, "manual_axis_type"):
      axes |= kind.manual_axis_type.varying
    else:
      axes |= getattr(kind, "vma", frozenset())  # the name in earlier releases
  return axes


def closure_as_argument(
  fun: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], list[Any], set[str]]:
  """`fun` with the arrays that it closes over as its first argument, those, and the axes of collectives."""
  closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
  structure: Any = jax.tree.structure(shapes)

  def converted(constants: list[Any], *args: Any) -> Any:
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, constants))
    return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

  return converted, list(closed.consts), _collective_axes(closed.jaxpr)


def _collective_axes(jaxpr: Any) -> set[str]:
  axes: set[str] = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name in ("pvary", "pcast"):
      continue  # a matter of types alone
    for key in ("axes", "axis_name"):
      names = equation.params.get(key, ())
      axes |= {name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str)}
    for value in equation.params.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, "jaxpr", item)
        axes |= _collective_axes(inner) if hasattr(inner, "eqns") else set()
  return axes
