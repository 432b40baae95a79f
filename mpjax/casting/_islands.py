"""Islands: which float32 equations are computed together, from half-precision inputs to outputs.

An island is emitted as one `jax.checkpoint`, so that what is kept for the backward pass is what went in, in
half precision, and not what is inside, in float32.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

from mpjax import _compat
from mpjax.casting import _fp8_products
from mpjax.casting._decide import Mode, Node, Plan
from mpjax.casting._kinds import FLOAT32, Kind, castable, size
from mpjax.jaxpr import Trait, has


@dataclasses.dataclass
class Island:
  """A convex set of float32 equations.

  Attributes:
    nodes: in the order of the program.
    inputs: (variable, dtype) that are read.
    outputs: (variable, dtype) that are used outside.
    kept: whether it is emitted as a checkpoint; otherwise equation by equation.
  """

  nodes: list[Node]
  inputs: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
  outputs: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
  kept: bool = False


def schedule(plan: Plan) -> list[Node | Island]:
  """The plan's equations in an order in which they can be carried out, islands as one."""
  nodes = plan.nodes
  if not plan.rules.islands:
    return list(nodes)
  producer = {v: i for i, node in enumerate(nodes) for v in node.equation.outvars}
  reads = [
    [producer[a] for a in node.equation.invars if _compat.is_variable(a) and a in producer] for node in nodes
  ]
  inside = [_in_float32(node) and plan.rules.cheap(node.equation) for node in nodes]
  ends = [
    _is_product(node) and any(inside[j] for j in before) for node, before in zip(nodes, reads, strict=True)
  ]
  islands = _group(plan, reads, inside, ends)
  return _order(nodes, reads, islands)


def _in_float32(node: Node) -> bool:
  if node.mode is Mode.EACH:  # a change of weak type, say
    return len(node.outs) == 1 and node.outs[0].kind is not Kind.FIXED and node.outs[0].dtype == FLOAT32
  return node.mode is Mode.FULL and node.listed != "allow"


def _is_product(node: Node) -> bool:
  return node.listed == "allow" and node.mode is Mode.HALF


def _group(plan: Plan, reads: list[list[int]], inside: list[bool], ends: list[bool]) -> list[Island]:
  """Connected equations of one level, and the products that read them.

  Whatever leaves an island raises the level, a product's result too, so that no path returns to one.
  """
  level = [0] * len(reads)
  parent = list(range(len(reads)))

  def root(i: int) -> int:
    while parent[i] != i:
      parent[i] = parent[parent[i]]
      i = parent[i]
    return i

  for i, before in enumerate(reads):
    member = inside[i] or ends[i]
    level[i] = max(
      (level[j] + (member if not inside[j] else not member) + ends[j] for j in before), default=0
    )
    for j in before:
      if member and inside[j] and level[i] == level[j]:
        parent[root(i)] = root(j)
  groups: dict[int, list[int]] = {}
  for i in range(len(reads)):
    if inside[i] or ends[i]:
      groups.setdefault(root(i), []).append(i)
  islands = []
  readers: dict[Any, list[int]] = {}
  for i, node in enumerate(plan.nodes):
    for a in node.equation.invars:
      if _compat.is_variable(a):
        readers.setdefault(a, []).append(i)
  for members in groups.values():
    island = _island(plan, members, readers)
    if island.kept:
      islands.append(island)
  return islands


def _island(plan: Plan, members: list[int], readers: dict[Any, list[int]]) -> Island:
  nodes = [plan.nodes[i] for i in members]
  own = {v for node in nodes for v in node.equation.outvars}
  inputs: dict[Any, Any] = {}
  for node in nodes:
    for a in node.equation.invars:
      if _compat.is_variable(a) and a not in own:
        inputs[a] = plan.held[a].dtype if castable(a.aval) else a.aval.dtype
  outputs: dict[tuple[Any, Any], None] = {}
  within = set(members)
  for node in nodes:
    for v in node.equation.outvars:
      outside = [plan.nodes[i] for i in readers.get(v, ()) if i not in within]
      if castable(v.aval):
        for dtype in _read_as(plan, v, outside):
          outputs[v, dtype] = None
      elif outside or v in plan.jaxpr.outvars:
        outputs[v, getattr(v.aval, "dtype", None)] = None
  island = Island(nodes, list(inputs.items()), list(outputs))
  # What the products at its end read besides is saved with or without the island.
  read = {a for n in nodes if n.mode is Mode.FULL for a in n.equation.invars if _compat.is_variable(a)}
  half = max((size(v) for v in read - own if plan.held[v].kind is Kind.HALF), default=0)
  # Before the first product nothing is half yet: an embedding and the norm after it.
  half = half or max(
    (size(v) for v, dtype in island.outputs if dtype != FLOAT32 and castable(v.aval)), default=0
  )
  heavy = (n for n in nodes if n.mode is Mode.FULL and not has(n.equation, Trait.NO_RESIDUAL))
  island.kept = half > 1 and any(2 * size(a) >= half for n in heavy for a in n.equation.invars)
  return island


def _read_as(plan: Plan, v: Any, outside: list[Node]) -> list[Any]:
  """The dtypes in which a float32 result is read outside its island: half alone, where anyone reads half."""
  full = plan.held[v].dtype
  if plan.held[v].kind is Kind.HALF:  # a product's result: who reads it in float32 widens it there
    halves = []
  else:
    halves = [d for node in outside if (d := read_dtype(plan, node, v)) != full]
  narrow = plan.held[v].kind in (Kind.ISLAND, Kind.FLEXIBLE) and bool(halves) and not plan.held[v].wide
  wanted = dict.fromkeys(halves)
  if len(halves) < len(outside) and not narrow:
    wanted[full] = None
  for atom, held in zip(plan.jaxpr.outvars, plan.outs, strict=True):
    if atom is v:
      wanted[held.dtype] = None
  return list(wanted)


def read_dtype(plan: Plan, node: Node, atom: Any) -> Any:
  """The dtype in which an equation reads a float32 value of the program."""
  if node.fp8 is not None and plan.how(atom).kind is Kind.FLEXIBLE:
    return FLOAT32  # master weights are rounded once
  if node.mode is Mode.HALF and node.call is None and not _compat.bodies(node.equation):
    return node.half
  if node.mode is Mode.ENTER:
    dtypes = [h.dtype for a, h in zip(node.equation.invars, node.call.ins, strict=True) if a is atom]
    return dtypes[0]
  if node.mode in (Mode.EACH, Mode.CAST):
    return plan.how(atom).dtype
  return atom.aval.dtype


def saved_dtype(island: Island, plan: Plan) -> Any:
  """The FP8 format in which what an island reads is kept for the backward pass; `None`: in half precision.

  Not before the loss, nor where there is an exponential: a rounding error there is one of the exponent.
  """
  recipe = plan.rules.overrides.recipe_at(island.nodes[0].path)
  if (
    recipe is None or recipe.saved_activations != "fp8" or not _fp8_products.works(recipe) or not plan.layers
  ):
    return None
  inside = plan.rules.primitives([node.equation for node in island.nodes])
  exponential = any(has(primitive, Trait.EXPONENTIAL) for primitive in inside)
  followed = any(v in plan.layers.reaching for v, _ in island.outputs)
  return recipe.forward if followed and not exponential else None


def _order(nodes: list[Node], reads: list[list[int]], islands: list[Island]) -> list[Node | Island]:
  """A topological order of nodes and islands, as near to the program's as can be; effects stay in theirs."""
  unit_of: dict[int, int] = {}
  units: list[Node | Island] = []
  position = {id(node): i for i, node in enumerate(nodes)}
  for island in islands:
    unit_of |= {position[id(node)]: len(units) for node in island.nodes}
    units.append(island)
  for i, node in enumerate(nodes):
    if i not in unit_of:
      unit_of[i] = len(units)
      units.append(node)
  first = [math.inf] * len(units)
  after: list[set[int]] = [set() for _ in units]
  waits: list[set[int]] = [set() for _ in units]
  effect = None
  for i, node in enumerate(nodes):
    unit = unit_of[i]
    first[unit] = min(first[unit], i)
    before = {unit_of[j] for j in reads[i]}
    if node.equation.effects:
      before |= set() if effect is None else {effect}
      effect = unit
    for other in before - {unit}:
      waits[unit].add(other)
      after[other].add(unit)
  ready = [(first[u], u) for u in range(len(units)) if not waits[u]]
  heapq.heapify(ready)
  ordered = []
  while ready:
    _, unit = heapq.heappop(ready)
    ordered.append(units[unit])
    for other in after[unit]:
      waits[other].discard(unit)
      if not waits[other]:
        heapq.heappush(ready, (first[other], other))
  return ordered
