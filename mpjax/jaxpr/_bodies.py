"""The bodies of higher-order equations, and which operand each of their inputs is."""

from __future__ import annotations

from mpjax import _compat
from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.jaxpr._primitives import CallKind, call_kind


def alignment(equation: JaxprEqn) -> list[tuple[AnyJaxpr, list[int]]]:
  """Returns each body of a higher-order equation, with the operand that each of its inputs is."""
  kind, parameters = call_kind(equation), equation.params
  n = len(equation.invars)
  if kind is CallKind.WHILE:
    first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
    rest = list(range(first + second, n))
    return [
      (parameters["cond_jaxpr"], [*range(first), *rest]),
      (parameters["body_jaxpr"], [*range(first, first + second), *rest]),
    ]
  if kind is CallKind.COND:
    return [(branch, list(range(1, n))) for branch in parameters["branches"]]
  found = _compat.bodies(equation)[:1]
  return [(body, list(range(n))) for body in found if len(_compat.open_jaxpr(body).invars) == n]
