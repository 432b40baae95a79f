"""The derivative rules of a program's `custom_jvp` and `custom_vjp` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad

from mpjax import _compat
from mpjax._types import JaxprEqn


def custom_jvp_rule(equation: JaxprEqn) -> Callable[..., list[Any]]:
  """Returns the rule of a `custom_jvp_call`: (*primals, *tangents) to [*primals, *tangents]."""
  _, rule = _compat.functions_of(equation)
  return rule


def custom_vjp_rules(equation: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Returns the rules of a `custom_vjp_call`.

  Returns:
    forward: (operands, which operands are differentiated) to (residuals, outputs), two lists.
    backward: (residuals, cotangents of the outputs) to the cotangents of the operands, `None` for zero.
  """
  _, forward, backward = _compat.functions_of(equation)

  def run_forward(operands: list[Any], perturbed: list[bool]) -> tuple[list[Any], list[Any]]:
    out = forward(*(x for pair in zip(operands, perturbed, strict=True) for x in pair))
    # Residuals that are operands are not returned again.
    returned = iter(out)
    residuals = [next(returned) if i is None else operands[i] for i in _compat.forwarded(equation)]
    return residuals, list(returned)

  def run_backward(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
    out = _compat.cotangents_of(backward(*residuals, *cotangents))
    return [None if isinstance(x, (ad.Zero, jax.custom_derivatives.SymbolicZero)) else x for x in out]

  return run_forward, run_backward
