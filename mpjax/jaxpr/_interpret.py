"""The one evaluator of jaxprs: with a rule for each equation, into bodies where the rule asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax

from mpjax import _compat
from mpjax._types import AnyJaxpr, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr._bodies import (
  as_function,
  bodies_of,
  call_layout,
  default_branch,
  open_jaxpr,
  scan_parts,
  variables_of,
  while_parts,
)
from mpjax.jaxpr._primitives import CallKind, Trait, call_kind, has
from mpjax.jaxpr._scopes import as_traced

Rule: TypeAlias = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  # (equation, operands) -> results


def last_reads(steps: Sequence[Iterable[Atom]], results: Iterable[Atom]) -> list[list[Var]]:
  """For each step, given as what it reads, the variables that neither a later one nor the results read."""
  read = set(variables_of(results))
  last = []
  for step in reversed(steps):
    operands = set(variables_of(step))
    last.append(list(operands - read))
    read |= operands
  return last[::-1]


def bind_again(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
  """An equation applied to other operands, with its source line, scope and context."""
  with as_traced(equation):
    return _compat.bind(equation, operands)


def interpret(closed: ClosedJaxpr, arguments: Sequence[Any], rule: Rule) -> list[Any]:
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

  expired = last_reads([equation.invars for equation in jaxpr.eqns], jaxpr.outvars)
  for equation, last in zip(jaxpr.eqns, expired, strict=True):
    operands = [read(atom) for atom in equation.invars]
    for variable in last:
      del environment[variable]
    environment |= zip(equation.outvars, rule(equation, operands), strict=True)
  return [read(atom) for atom in jaxpr.outvars]


def into_bodies(equation: JaxprEqn, operands: list[Any], rule: Rule) -> Sequence[Any]:
  """Returns the results of a higher-order equation with a rule applied in its bodies.

  Calls that run once are put in line; kernels, `shard_map`s and choices by platform are as they were.
  """
  kind = call_kind(equation)

  def body(jaxpr: AnyJaxpr) -> Callable[..., list[Any]]:
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])
    return lambda *operands: interpret(closed, list(operands), rule)

  if kind is CallKind.SCAN:
    k, n, options = scan_parts(equation)
    inside = body(equation.params["jaxpr"])

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
      out = inside(*operands[:k], *carry, *xs)
      return out[:n], out[n:]

    carry, ys = jax.lax.scan(step, operands[k : k + n], operands[k + n :], **options)
    return [*carry, *ys]
  if kind is CallKind.WHILE:
    condition, again, first, second = while_parts(equation)
    start = first + second
    go_on = lambda carry: body(condition)(*operands[:first], *carry)[0]
    return jax.lax.while_loop(
      go_on, lambda carry: body(again)(*operands[first:start], *carry), operands[start:]
    )
  if kind is CallKind.COND and default_branch(equation) is None:
    return jax.lax.switch(operands[0], [body(b) for b in equation.params["branches"]], *operands[1:])
  bodies = call_layout(equation).bodies
  if kind is not None and kind.runs_once and bodies:
    return body(bodies[0].jaxpr)(*operands)
  return bind_again(equation, operands)


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
