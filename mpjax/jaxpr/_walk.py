"""Walks over jaxprs: what of one is live, when a value is read last, and evaluating one again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax import _compat
from mpjax._types import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr._bodies import as_function, bodies_of, is_variable, open_jaxpr
from mpjax.jaxpr._primitives import Trait, has
from mpjax.jaxpr._scopes import as_traced


def needed(jaxpr: Jaxpr, outputs: Sequence[bool] | None = None) -> set[Var]:
  """The variables that the outputs depend on, or some of them, those outputs themselves included."""
  chosen = outputs if outputs is not None else [True] * len(jaxpr.outvars)
  found = {v for v, flag in zip(jaxpr.outvars, chosen, strict=True) if flag and is_variable(v)}
  for equation in reversed(jaxpr.eqns):
    if not found.isdisjoint(equation.outvars):
      found.update(v for v in equation.invars if is_variable(v))
  return found


def live(jaxpr: Jaxpr) -> list[JaxprEqn]:
  """The equations whose results or effects matter."""
  read = {v for v in jaxpr.outvars if is_variable(v)}
  kept = []
  for equation in reversed(jaxpr.eqns):
    if equation.effects or not read.isdisjoint(equation.outvars):
      kept.append(equation)
      read.update(a for a in equation.invars if is_variable(a))
  return kept[::-1]


def last_reads(equations: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[list[Var]]:
  """For each equation, the variables that neither a later one nor the results read."""
  read = {v for v in results if is_variable(v)}
  last = []
  for equation in reversed(equations):
    operands = {v for v in equation.invars if is_variable(v)}
    last.append(list(operands - read))
    read |= operands
  return last[::-1]


def bind_again(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
  """An equation applied to other operands, with its source line, scope and context."""
  with as_traced(equation):
    return _compat.bind(equation, operands)


def interpret(
  closed: ClosedJaxpr, arguments: Sequence[Any], rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> list[Any]:
  """Evaluates a closed jaxpr; every value is freed after its last read.

  Args:
    closed: the jaxpr.
    arguments: its inputs.
    rule: (equation, operands) -> results, such as `bind_again`.
  """
  jaxpr = closed.jaxpr
  environment: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  environment |= zip(jaxpr.invars, arguments, strict=True)

  def read(atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else environment[atom]

  for equation, last in zip(jaxpr.eqns, last_reads(jaxpr.eqns, jaxpr.outvars), strict=True):
    operands = [read(atom) for atom in equation.invars]
    for variable in last:
      del environment[variable]
    environment |= zip(equation.outvars, rule(equation, operands), strict=True)
  return [read(atom) for atom in jaxpr.outvars]


def closure_as_argument(
  fun: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], list[Any], set[str]]:
  """`fun` with the arrays that it closes over as its first argument, those, and the axes of collectives."""
  closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
  structure = jax.tree.structure(shapes)

  def converted(constants: list[Any], *args: Any) -> Any:
    run = as_function(ClosedJaxpr(closed.jaxpr, constants))
    return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

  return converted, list(closed.consts), _collective_axes(closed.jaxpr)


def _collective_axes(jaxpr: Jaxpr) -> set[str]:
  axes: set[str] = set()
  for equation in jaxpr.eqns:
    if has(equation, Trait.MARKS_AXES):
      continue
    for key in ("axes", "axis_name"):
      names = equation.params.get(key, ())
      axes |= {name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str)}
    for body in bodies_of(equation):
      axes |= _collective_axes(open_jaxpr(body))
  return axes
