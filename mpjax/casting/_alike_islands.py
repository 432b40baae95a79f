"""Keys of islands, and of the bodies of jitted functions, that are equal if one function computes both.

So JAX traces the layers of a deep model once. Its caches belong to the function: its program, its derivative,
and what that saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping

import numpy as np

from mpjax._types import Atom, Var
from mpjax.casting._cast_plan import Call, CastPlan, Island, Node
from mpjax.casting._kinds import Held
from mpjax.jaxpr import call_kind, is_variable, scopes_inside, source_line


def island_key(island: Island, held: Mapping[Var, Held], depth: int) -> Hashable:
  """Returns the key of an island that reads no side inputs.

  Args:
    island: the island.
    held: how each variable is held.
    depth: how many scopes the equations have in common, which the function leaves out.
  """
  numbers: dict[Var, int] = {}

  def of(atom: Atom) -> Hashable:
    if is_variable(atom):
      return numbers.setdefault(atom, len(numbers)), atom.aval, held.get(atom)
    return np.asarray(atom.val).tobytes(), atom.aval

  def of_node(node: Node) -> Hashable:
    equation = node.equation
    atoms = (*equation.invars, *equation.outvars)
    parameters = tuple(sorted(equation.params.items()))
    place = scopes_inside(equation, depth), source_line(equation), equation.ctx
    return equation.primitive, tuple(map(of, atoms)), parameters, place, _decided(node)

  inputs, outputs = (tuple((of(v), d) for v, d in pairs) for pairs in (island.inputs, island.outputs))
  nodes = tuple(map(of_node, (*island.copies, *island.nodes)))
  return inputs, nodes, outputs, len(island.copies), island.fenced, island.saved


def plan_key(plan: CastPlan) -> Hashable:
  """Returns the key of a body's plan that reads no side inputs; plans of other jaxprs are never equal."""
  return plan.jaxpr, tuple(plan.held[v] for v in plan.inputs), plan.outs, tuple(map(_unit_key, plan.units))


def _unit_key(unit: Node | Island) -> Hashable:
  if isinstance(unit, Island):
    copies, nodes = (tuple(map(_unit_key, nodes)) for nodes in (unit.copies, unit.nodes))
    return copies, nodes, unit.inputs, unit.outputs, unit.fenced, unit.saved, unit.loss_of
  return unit.equation, _decided(unit)


def _decided(node: Node) -> Hashable:
  """Returns all that is decided about an equation."""
  other = ("equation", "path", "call")
  return *(x for name, x in vars(node).items() if name not in other), node.call and _call_key(node.call)


def _call_key(call: Call) -> Hashable:
  kind = call_kind(call.equation)
  if kind is None or not kind.is_plain:  # a rule is decided where the call is
    return call
  return call.ins, call.outs, call.carry, tuple(map(plan_key, call.plans))


def common_scopes(island: Island) -> int:
  """Returns how many scopes, from the outermost on, the equations of an island have in common."""
  stacks = {n.equation.source_info.name_stack.stack for n in (*island.copies, *island.nodes)}
  return len([*itertools.takewhile(lambda scopes: len({*scopes}) == 1, zip(*stacks, strict=False))])
