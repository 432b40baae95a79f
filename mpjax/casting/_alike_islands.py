"""One function for equal islands, as in the layers of a deep model, so that JAX traces it once.

The bodies of a jitted function that is called several times also share one, if the decisions are the same.
JAX's caches belong to the function: its program, its derivative, and what that saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from mpjax._types import Array, Atom, Jaxpr, Var
from mpjax.casting._cast_plan import Call, CastPlan, Island, Node
from mpjax.casting._kinds import Held
from mpjax.jaxpr import call_kind, is_variable, scopes_inside, source_line

Function = Callable[..., list[Array]]


class AlikeIslands:
  """The functions of the islands of one program, and of the bodies of its calls."""

  def __init__(self) -> None:
    self._functions: dict[Hashable, Function] = {}
    self._bodies: dict[Jaxpr, list[tuple[CastPlan, Sequence[Array], Function]]] = {}

  def function(self, island: Island, held: Mapping[Var, Held], depth: int, own: Function) -> Function:
    """Returns the function of an equal earlier island; `own` if this is the first.

    Args:
      island: the island; nothing in it reads side inputs.
      held: how each variable is held.
      depth: how many scopes the equations have in common, which the function leaves out.
      own: the function of the island itself.
    """
    try:
      return self._functions.setdefault(_key(island, held, depth), own)
    except TypeError:  # a parameter that cannot be compared
      return own

  def body(self, plan: CastPlan, constants: Sequence[Array], own: Function) -> Function:
    """Returns the function of an equal earlier body; `own` if this is the first.

    Args:
      plan: the plan of the body; nothing in it reads side inputs.
      constants: the constants that the body is closed over.
      own: the function of the body itself, which holds its constants.
    """
    others = self._bodies.setdefault(plan.jaxpr, [])
    key = _plan_key(plan) if others else None  # most bodies have one plan
    for other, of_constants, function in others:
      if list(map(id, constants)) == list(map(id, of_constants)) and _plan_key(other) == key:
        return function
    others.append((plan, constants, own))
    return own


def _key(island: Island, held: Mapping[Var, Held], depth: int) -> Hashable:
  """Returns a key that is equal for two islands if their functions are the same."""
  numbers: dict[Var, int] = {}

  def of(atom: Atom) -> Hashable:
    if not is_variable(atom):
      value = np.asarray(atom.val)
      return value.tobytes(), atom.aval
    if atom in numbers:
      return numbers[atom]
    numbers[atom] = len(numbers)
    return atom.aval, held.get(atom)

  inputs = tuple((of(v), dtype) for v, dtype in island.inputs)
  nodes = tuple(_node_key(n, of, depth) for n in itertools.chain(island.copies, island.nodes))
  outputs = tuple((of(v), dtype) for v, dtype in island.outputs)
  return inputs, nodes, outputs, len(island.copies), island.fenced, island.saved


def _node_key(node: Node, of: Callable[[Atom], Hashable], depth: int) -> Hashable:
  equation = node.equation
  return (
    equation.primitive,
    tuple(map(of, equation.invars)),
    tuple(map(of, equation.outvars)),
    tuple(sorted(equation.params.items())),
    scopes_inside(equation, depth),
    source_line(equation),
    equation.ctx,
    _decided(node),
    node.call,
  )


def _decided(node: Node) -> Hashable:
  """Returns how an equation is executed, without its bodies."""
  return (
    (node.listed, node.mode, node.half, node.outs, node.reads, node.widened, node.own_casts),
    (node.result_dtype, node.stores_gradient, node.fp8),
  )


def _plan_key(plan: CastPlan) -> Hashable:
  """Returns a key that is equal for two plans of one body if they are executed alike."""
  numbers = {node: i for i, node in enumerate(plan.nodes)}

  def of(unit: Node | Island) -> Hashable:
    if not isinstance(unit, Island):
      return numbers[unit]
    nodes = tuple(numbers[node] for node in (*unit.copies, *unit.nodes))
    return nodes, len(unit.copies), unit.inputs, unit.outputs, unit.fenced, unit.saved

  nodes = tuple((_decided(node), node.call and _call_key(node.call)) for node in plan.nodes)
  inputs = tuple(plan.held[v] for v in plan.inputs)
  return plan.jaxpr, inputs, nodes, tuple(map(of, plan.units)), plan.outs


def _call_key(call: Call) -> Hashable:
  """Returns a key that is equal for two calls if their bodies are executed alike."""
  kind = call_kind(call.equation)
  if kind is None or not kind.is_plain:  # a rule is decided where the call is
    return call
  return call.ins, call.outs, call.carry, tuple(map(_plan_key, call.plans))


def common_scopes(island: Island) -> int:
  """Returns how many scopes, from the outermost on, the equations of an island have in common."""
  stacks = {n.equation.source_info.name_stack for n in itertools.chain(island.copies, island.nodes)}
  first, depth = next(iter(stacks)), 0
  while depth < len(first) and all(stack[: depth + 1] == first[: depth + 1] for stack in stacks):
    depth += 1
  return depth
