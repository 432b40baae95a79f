"""Walks over jaxprs: what of one is live, when a value is read last, and evaluating one again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax import _compat
from mpjax._types import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr._bodies import alignment, as_function, bodies_of, open_jaxpr, variables_of
from mpjax.jaxpr._primitives import CallKind, Trait, call_kind, has
from mpjax.jaxpr._scopes import as_traced


class Live(NamedTuple):
  """The part of a jaxpr that matters.

  Attributes:
    equations: in the order of the program.
    variables: those that are read, by the outputs or by these equations.
  """

  equations: list[JaxprEqn]
  variables: set[Var]


def live(jaxpr: Jaxpr, outputs: Sequence[bool] | None = None, *, effects: bool = True) -> Live:
  """What of a jaxpr its outputs need.

  Args:
    jaxpr: an open jaxpr.
    outputs: which of its outputs; all by default.
    effects: also keep equations that have an effect, and what they need.
  """
  chosen = outputs if outputs is not None else [True] * len(jaxpr.outvars)
  read = set(variables_of(v for v, flag in zip(jaxpr.outvars, chosen, strict=True) if flag))
  kept = []
  for equation in reversed(jaxpr.eqns):
    if (effects and equation.effects) or not read.isdisjoint(equation.outvars):
      kept.append(equation)
      read.update(variables_of(equation.invars))
  return Live(kept[::-1], read)


def inputs_read(jaxpr: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
  """Returns which inputs of a jaxpr some of its outputs are computed of, also through `jit` and `cond`.

  Args:
    jaxpr: an open jaxpr.
    outputs: which of its outputs.
  """
  read = set(variables_of(v for v, flag in zip(jaxpr.outvars, outputs, strict=True) if flag))
  for equation in reversed(jaxpr.eqns):
    flags = [v in read for v in equation.outvars]
    if not any(flags):
      continue
    operands = equation.invars
    kind = call_kind(equation)
    bodies = alignment(equation) if kind in (CallKind.JIT, CallKind.INLINE, CallKind.COND) else []
    if bodies:
      chosen = {0} if kind is CallKind.COND else set()
      for body, at in bodies:
        chosen.update(i for i, flag in zip(at, inputs_read(open_jaxpr(body), flags), strict=True) if flag)
      operands = [operands[i] for i in sorted(chosen)]
    read.update(variables_of(operands))
  return [v in read for v in jaxpr.invars]


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

  expired = last_reads([equation.invars for equation in jaxpr.eqns], jaxpr.outvars)
  for equation, last in zip(jaxpr.eqns, expired, strict=True):
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
