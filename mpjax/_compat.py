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
  """An `optax.MultiSteps` that calls; whether it drops non-finite gradients."""

  skips_nonfinite: bool


def multi_steps_outside() -> MultiStepsOutside | None:
  """The `optax.MultiSteps` from whose `update` this is called, at any depth; `None` if there is none.

  optax passes a wrapped transform no word of its wrapper, so the call stack is asked.
  """
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None:
    if frame.f_code is optax.MultiSteps.update.__code__:
      rule = getattr(frame.f_locals["self"], "_should_skip_update_fn", None)
      return MultiStepsOutside(rule is optax.skip_not_finite)
    frame = frame.f_back
  return None


def vary_like(tree: Any, like: Any) -> Any:
  """`tree` marked as varying over the `shard_map` axes that `like` varies over; elsewhere as it is."""
  axes = _varying_axes(like)

  def leaf(x: Any) -> Any:
    missing = axes - _varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(leaf, tree) if axes else tree


def _varying_axes(x: Any) -> frozenset[str]:
  kind = jax.typeof(x)
  if hasattr(kind, "manual_axis_type"):
    return kind.manual_axis_type.varying
  return getattr(kind, "vma", frozenset())  # the name in the first 0.10 releases
