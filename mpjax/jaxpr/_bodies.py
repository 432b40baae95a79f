"""The bodies of higher-order equations, and the operand that each input of a body comes from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
from jax.extend.core import jaxpr_as_fun

from mpjax import _compat
from mpjax._types import AnyJaxpr, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from mpjax.jaxpr._primitives import CallKind, call_kind

if TYPE_CHECKING:
  from typing_extensions import TypeIs


T = TypeVar("T")


def is_variable(atom: Atom) -> TypeIs[Var]:
  """Returns whether a jaxpr's atom is a variable, not a literal."""
  return not isinstance(atom, Literal)


def variables_of(atoms: Iterable[Atom]) -> list[Var]:
  """Returns the variables among atoms, in their order."""
  return [atom for atom in atoms if is_variable(atom)]


def values_read(equation: JaxprEqn) -> list[Atom]:
  """Returns the operands that an equation reads, without the originals, which only carry gradients."""
  return list(equation.invars[: len(equation.invars) - len(equation.params.get("originals", ()))])


def shape_of(atom: Atom) -> tuple[int, ...]:
  """Returns the shape of a variable or literal; () if it has no shape, as a token."""
  return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
  """Returns the dtype of a variable or literal, NumPy's or an extended one; `None` for a token."""
  return getattr(atom.aval, "dtype", None)


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
  """Returns a jaxpr with `eqns`, from an open one or one that is closed over its constants."""
  return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def constants_of(jaxpr: AnyJaxpr) -> list[Any]:
  """Returns the constants that a jaxpr is closed over, in the order of its `constvars`."""
  return list(jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else []


def bodies_of(equation: JaxprEqn) -> list[AnyJaxpr]:
  """Returns the jaxprs among the parameters of an equation."""
  found = []
  for value in equation.params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, (Jaxpr, ClosedJaxpr)):
        found.append(item)
  return found


def equations_in(
  jaxpr: AnyJaxpr, enters: Callable[[JaxprEqn], bool] = lambda equation: True
) -> Iterator[JaxprEqn]:
  """Yields the equations of a jaxpr, and, for those that it `enters`, of their bodies at any depth."""
  for equation in open_jaxpr(jaxpr).eqns:
    yield equation
    for body in bodies_of(equation) if enters(equation) else ():
      yield from equations_in(body, enters)


def once_for_each(fact: Callable[[Jaxpr], T]) -> Callable[[AnyJaxpr], T]:
  """Returns a function of a jaxpr that computes a fact of the open one once for each, while that exists."""
  known: weakref.WeakKeyDictionary[Jaxpr, T] = weakref.WeakKeyDictionary()

  @functools.wraps(fact)
  def found(jaxpr: AnyJaxpr) -> T:
    body = open_jaxpr(jaxpr)
    try:
      return known[body]
    except KeyError:
      return known.setdefault(body, fact(body))

  return found


class CallBody(NamedTuple):
  """A body of a call.

  Attributes:
    jaxpr: the body.
    operands: for each of its inputs, the index of the call's operand.
    decides: whether its output says if a `while` goes on; the outputs of other bodies are the call's results.
  """

  jaxpr: AnyJaxpr
  operands: list[int]
  decides: bool = False


class CallLayout(NamedTuple):
  """The relation of a call's operands and results to its bodies.

  Attributes:
    bodies: in the order of the equation's parameters.
    carry: the operands that a loop carries; the loop returns them as its first results.
    rows: the operands of which each step of a `scan` reads a row, as it adds a row to each result after the
      carry; `None` for another call.
    choice: the operand that says which body runs; `None` if all run.
  """

  bodies: list[CallBody]
  carry: range = range(0)
  rows: range | None = None
  choice: int | None = None


def call_layout(equation: JaxprEqn) -> CallLayout:
  """Returns the layout of a higher-order equation; without bodies if they are unknown."""
  kind, n = call_kind(equation), len(equation.invars)
  if kind is CallKind.WHILE:
    p, first = equation.params, equation.params["cond_nconsts"]
    carry = range(first + p["body_nconsts"], n)
    condition = CallBody(p["cond_jaxpr"], [*range(first), *carry], decides=True)
    return CallLayout([condition, CallBody(p["body_jaxpr"], [*range(first, n)])], carry)
  if kind is CallKind.COND:
    operands = [*range(1, n)]
    return CallLayout([CallBody(branch, operands) for branch in equation.params["branches"]], choice=0)
  sizes = lambda of: (len(of.invars), len(of.outvars))
  found = [body for body in bodies_of(equation)[:1] if sizes(open_jaxpr(body)) == sizes(equation)]
  bodies = [CallBody(body, [*range(n)]) for body in found]
  if kind is CallKind.SCAN:
    k, carried = _compat.scan_counts(equation)
    return CallLayout(bodies, range(k, k + carried), range(k + carried, n))
  return CallLayout(bodies)


def as_function(jaxpr: AnyJaxpr) -> Callable[..., list[Any]]:
  """Returns a jaxpr without open constants as a function of its inputs."""
  return jaxpr_as_fun(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, []))


def scan_parts(equation: JaxprEqn) -> tuple[int, int, dict[str, Any]]:
  """Returns the numbers of constants and carries of a `scan`, and its options for `jax.lax.scan`."""
  consts, carry = _compat.scan_counts(equation)
  return consts, carry, {key: equation.params[key] for key in ("length", "reverse", "unroll")}


def times_run(equation: JaxprEqn) -> int:
  """Returns how often a call runs its body: the length of a `scan`; 1 for a `while`, since it is unknown."""
  return equation.params["length"] if call_kind(equation) is CallKind.SCAN else 1


def default_branch(equation: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the branch of a choice by platform for other platforms; `None` for any other equation."""
  platforms = equation.params.get("branches_platforms")
  if not platforms:
    return None
  return equation.params["branches"][platforms.index(None) if None in platforms else -1]


def joined_branches(traced: list[tuple[Jaxpr, list[Any]]], operands: list[Any]) -> tuple[ClosedJaxpr, ...]:
  """Returns branches with one list of operands: the constants of all branches, in order, then `operands`."""
  counts = [len(own) for _, own in traced]
  every = [c for _, own in traced for c in own]

  def branch(i: int, jaxpr: Jaxpr) -> ClosedJaxpr:
    start = sum(counts[:i])

    def run(*xs: Any) -> list[Any]:
      return as_function(jaxpr)(*xs[start : start + counts[i]], *xs[len(every) :])

    return jax.make_jaxpr(run)(*every, *operands) if every else ClosedJaxpr(jaxpr, [])

  return tuple(branch(i, jaxpr) for i, (jaxpr, _) in enumerate(traced))
