"""The dtypes in which a decided equation reads its operands, and the one that it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn, Var
from mpjax.casting._cast_plan import Mode, Node
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, size
from mpjax.casting._product_roles import ProductRoles
from mpjax.jaxpr import Trait, bodies_of, dtype_of, has, is_variable, shape_of


def with_reads(node: Node, held: Mapping[Var, Held], rules: CastingRules, roles: ProductRoles | None) -> Node:
  """Returns a decision with the dtypes that follow from it.

  Args:
    node: the decision, with its mode and its bodies.
    held: how every variable of its program is held in the end.
    rules: what decides.
    roles: of its program's products; `None` where they are not known.
  """
  equation = node.equation
  reads = tuple(
    _read_dtype(node, i, _how(atom, held)) if castable(atom.aval) else None
    for i, atom in enumerate(equation.invars)
  )
  widened: frozenset[int] = frozenset()
  own_casts: frozenset[int] = frozenset()
  result = None
  if node.fp8 is not None:
    own = node.outs[0].dtype if node.mode is Mode.HALF else dtype_of(equation.outvars[0])
    result = rules.accum_dtype or own
  elif node.mode is Mode.HALF and not bodies_of(equation):
    widened = _widened(equation)
    if rules.wide_gradients:
      own_casts = _parameters(node, held, roles) - widened
    asks = "preferred_element_type" in equation.params
    if asks and (equation.params["preferred_element_type"] is not None or node.outs[0].dtype != node.half):
      result = node.outs[0].dtype
    if asks and node.listed == "allow":
      result = rules.accum_dtype or result
  return dataclasses.replace(node, reads=reads, widened=widened, own_casts=own_casts, result_dtype=result)


def _read_dtype(node: Node, i: int, held: Held) -> np.dtype | None:
  if node.call is not None:
    return node.call.ins[i].dtype
  if node.fp8 is not None and held.kind is Kind.FLEXIBLE:
    return FLOAT32  # master weights are rounded once
  if node.mode is Mode.HALF and not bodies_of(node.equation):
    return node.half
  return held.dtype if node.mode in (Mode.EACH, Mode.CAST, Mode.EDGE) else FLOAT32


def _how(atom: Atom, held: Mapping[Var, Held]) -> Held:
  return held[atom] if is_variable(atom) else initial(atom.aval)


def _parameters(node: Node, held: Mapping[Var, Held], roles: ProductRoles | None) -> frozenset[int]:
  """Returns the operands that are float32 parameters, or made of those alone: no layer came before."""

  def is_parameter(a: Atom) -> bool:
    flexible = is_variable(a) and held[a].kind is Kind.FLEXIBLE and not held[a].wide
    return flexible and (roles is None or not roles.is_active(a))

  return frozenset(i for i, a in enumerate(node.equation.invars) if is_parameter(a))


def _widened(equation: JaxprEqn) -> frozenset[int]:
  """Returns the operands that are broadcast in an equation, and cast after that."""
  result = equation.outvars[0]
  if equation.primitive is jax.lax.broadcast_in_dim_p:
    operand = equation.invars[0]
    grows = is_variable(operand) and size(operand) != size(result)
    return frozenset([0] if grows else [])
  if not has(equation, Trait.BROADCASTS):
    return frozenset()
  return frozenset(
    i
    for i, a in enumerate(equation.invars)
    if is_variable(a) and castable(a.aval) and shape_of(a) != shape_of(result)
  )
