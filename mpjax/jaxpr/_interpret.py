"""The only evaluator of jaxprs, with a rule for each equation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr._bodies import (
  as_function,
  constants_of,
  equations_in,
  open_jaxpr,
  shape_of,
  variables_of,
)
from mpjax.jaxpr._flow import live
from mpjax.jaxpr._primitives import Trait, has
from mpjax.jaxpr._scopes import as_traced

Rule: TypeAlias = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  # (equation, operands) -> results


def last_reads(steps: Sequence[Iterable[Atom]], results: Iterable[Atom]) -> list[list[Var]]:
  """Returns, for each step (given as the atoms it reads), the variables that are read for the last time."""
  read = set(variables_of(results))
  last = []
  for step in reversed(steps):
    operands = set(variables_of(step))
    last.append(list(operands - read))
    read |= operands
  return last[::-1]


def bind_again(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
  """Applies an equation to other operands, with its source line, scope and context."""
  with as_traced(equation):
    return _compat.bind(equation, operands)


def interpret(
  jaxpr: AnyJaxpr,
  arguments: Iterable[Any],
  rule: Rule,
  outputs: Sequence[bool] | None = None,
  *,
  effects: bool = True,
) -> list[Any]:
  """Evaluates what a jaxpr's outputs need; every value is freed after its last read.

  Args:
    jaxpr: the jaxpr, with its constants.
    arguments: its inputs: values of any kind that the rule takes.
    rule: (equation, operands) -> results, such as `bind_again`. Literals and constants reach it as they are.
    outputs: which outputs to return; all by default.
    effects: also evaluate equations with an effect.
  """
  body = open_jaxpr(jaxpr)
  equations, needed = live(body, outputs, effects=effects)
  results = body.outvars if outputs is None else list(itertools.compress(body.outvars, outputs))
  environment: dict[Var, Any] = {}

  def read(atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else environment[atom]

  def keep(variables: Iterable[Var], values: Iterable[Any]) -> None:
    environment.update((v, x) for v, x in zip(variables, values, strict=True) if v in needed)

  keep(body.constvars, constants_of(jaxpr))
  keep(body.invars, arguments)
  expired = last_reads([equation.invars for equation in equations], results)
  for equation, last in zip(equations, expired, strict=True):
    operands = [read(atom) for atom in equation.invars]
    for variable in last:
      del environment[variable]
    keep(equation.outvars, rule(equation, operands))
  return [read(atom) for atom in results]


def while_loop(
  equation: JaxprEqn,
  goes_on: Callable[[list[Any]], Any],
  step: Callable[[list[Any]], list[Any]],
  carry: list[Any],
) -> list[Any]:
  """Returns what `jax.lax.while_loop` does, also if `vmap` made a condition for each row.

  Args:
    equation: the `while` in the program.
    goes_on: its condition, given the carry.
    step: its body.
    carry: the first carry.
  """
  if not shape_of(open_jaxpr(equation.params["cond_jaxpr"]).outvars[0]):
    return jax.lax.while_loop(goes_on, step, carry)

  def masked(carry: list[Any]) -> list[Any]:
    return where_rows(goes_on(carry), step(carry), carry)

  return jax.lax.while_loop(lambda carry: jnp.any(goes_on(carry)), masked, carry)


def where_rows(rows: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
  """Returns arrays with the rows of `new` where bool[rows] holds, and the rows of `old` elsewhere."""
  return [
    jnp.where(rows.reshape(*rows.shape, *(1,) * (x.ndim - rows.ndim)), x, y)
    for x, y in zip(new, old, strict=True)
  ]


def closure_as_argument(
  fun: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], list[Any], set[str]]:
  """Returns `fun` with its closed-over arrays as first argument, these arrays, and the collectives' axes."""
  closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
  structure = jax.tree.structure(shapes)

  def converted(constants: list[Any], *args: Any) -> Any:
    run = as_function(ClosedJaxpr(closed.jaxpr, constants))
    return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

  equations = [e for e in equations_in(closed) if not has(e, Trait.MARKS_AXES)]
  values = [e.params.get(key, ()) for e in equations for key in ("axes", "axis_name")]
  axes = (axis for value in values for axis in (value if isinstance(value, tuple) else (value,)))
  return converted, list(closed.consts), {axis for axis in axes if isinstance(axis, str)}
