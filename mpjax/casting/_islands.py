"""Islands: float32 equations that are computed together, from half-precision inputs to outputs.

An island is emitted as one `jax.checkpoint`, so that the backward pass keeps its inputs, in
half precision, and not its inside, in float32.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import AbstractValue
from jax.extend.core import Primitive

from mpjax._types import Jaxpr, JaxprEqn, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import Decision, Island, Mode, Node
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._copies import Copies, held_dtype, is_exact_product, making_operands_again
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, size
from mpjax.casting._place import Place
from mpjax.casting._reasons import Code
from mpjax.jaxpr import (
  CallKind,
  Trait,
  bodies_of,
  call_kind,
  dtype_of,
  facts,
  has,
  is_variable,
  open_jaxpr,
  variables_of,
)


def pull_in(
  decisions: Sequence[Decision], held: dict[Var, Held], results: set[Var], full_outputs: bool
) -> list[Decision]:
  """Moves into float32 what only float32 reads, such as the scale and the mask before a softmax.

  The island then reads the values before it. A sum of two values of full size is an exception: the sum is
  smaller to save.

  Args:
    decisions: in the order of the program.
    held: how each variable is held; changed for what is moved.
    results: the variables that the program returns.
    full_outputs: whether those are read in float32.

  Returns:
    The decisions, some of them changed.
  """
  makers = {v: made for made in decisions for v in made.equation.outvars}
  users: dict[Var, list[Decision]] = {}
  found = []
  for made in reversed(decisions):
    equation = made.equation
    readers = [users.get(v, []) for v in equation.outvars]
    if _only_float32_reads(made, readers, results, full_outputs) and not _better_saved(made, held, makers):
      own = Held(Kind.ISLAND, FLOAT32)
      outs = tuple(own if castable(v.aval) else initial(v.aval) for v in equation.outvars)
      code = Code.ONLY_FLOAT32
      made = Decision(equation, made.path, "infer", Mode.FULL, made.half, code, "pulled in", outs)
      held.update(zip(equation.outvars, outs, strict=True))
    for atom in variables_of(equation.invars):
      users.setdefault(atom, []).append(made)
    found.append(made)
  return found[::-1]


def _only_float32_reads(
  made: Decision, readers: Sequence[list[Decision]], results: set[Var], full_outputs: bool
) -> bool:
  if made.mode not in (Mode.HALF, Mode.ENTER) or made.listed not in ("infer", "call"):
    return False
  if made.mode is Mode.ENTER and (call_kind(made.equation) is not CallKind.JIT or made.has_product()):
    return False
  returned = any(v in results for v in made.equation.outvars)
  if (returned and not full_outputs) or not (returned or any(readers)):
    return False
  return all(r.mode is Mode.FULL and r.listed in ("deny", "infer") for rs in readers for r in rs)


def _better_saved(made: Decision, held: Mapping[Var, Held], makers: Mapping[Var, Decision]) -> bool:
  """Returns whether a result is smaller to save than its inputs, or costs a memory pass to recompute."""
  return has(made.equation, Trait.MOVES) or _sums(made, held, makers) or _shrinks(made, held)


def _shrinks(made: Decision, held: Mapping[Var, Held]) -> bool:
  """Returns whether its outputs are smaller than its inputs."""
  return max(map(size, _halves(made, held)), default=0) > max(map(size, made.equation.outvars))


def _sums(made: Decision, held: Mapping[Var, Held], makers: Mapping[Var, Decision]) -> bool:
  """Returns whether an equation adds, or chooses between, two values of full size."""
  if not has(made.equation, Trait.CHOICE):
    return False
  largest = max(map(size, made.equation.invars))
  return len({_source(a, held, makers) for a in _halves(made, held) if size(a) == largest}) > 1


def _source(variable: Var, held: Mapping[Var, Held], makers: Mapping[Var, Decision]) -> Var:
  """Returns the half value that this one is an elementwise function of; itself, if there are several."""
  made = makers.get(variable)
  if made is None or made.mode is not Mode.HALF or made.listed != "infer" or has(made.equation, Trait.MOVES):
    return variable
  sources = {_source(a, held, makers) for a in _halves(made, held)}
  return sources.pop() if len(sources) == 1 else variable


def _halves(made: Decision, held: Mapping[Var, Held]) -> list[Var]:
  return [a for a in made.equation.invars if is_variable(a) and held[a].kind is Kind.HALF]


def in_units(
  nodes: Sequence[Node],
  jaxpr: Jaxpr,
  held: Mapping[Var, Held],
  outs: Sequence[Held],
  rules: CastingRules,
  place: Place,
) -> tuple[Node | Island, ...]:
  """Returns a program's decisions in an order in which they can be executed, islands as one.

  Args:
    nodes: the decisions, in the order of the program.
    jaxpr: the program.
    held: how each variable is held.
    outs: how each output is held.
    rules: the rules.
    place: the place of the program.
  """
  if not place.islands:
    return tuple(nodes)
  inside = [
    _in_float32(node) and rules.may_recompute(node.equation) and rules.computes_again(node.path)
    for node in nodes
  ]
  return _Grouping(nodes, jaxpr, held, outs, inside, rules, place).units()


def _in_float32(node: Node) -> bool:
  if node.mode is Mode.EACH:  # a change of weak type, for example
    return len(node.outs) == 1 and node.outs[0].kind is not Kind.FIXED and node.outs[0].dtype == FLOAT32
  return node.mode is Mode.FULL and node.listed != "allow"


def _is_product(node: Node) -> bool:
  return node.listed == "allow" and node.mode is Mode.HALF


class _Grouping:
  """Groups the nodes of one program into islands; `inside` says which may be in one."""

  def __init__(
    self,
    nodes: Sequence[Node],
    jaxpr: Jaxpr,
    held: Mapping[Var, Held],
    outs: Sequence[Held],
    inside: list[bool],
    rules: CastingRules,
    place: Place,
  ):
    self.nodes = nodes
    self.jaxpr = jaxpr
    self.held = held
    self.outs = outs
    self.inside = inside
    self.rules = rules
    self.place = place
    self.roles = place.roles
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    self.arguments = {v for v in inputs if place.roles is not None and place.roles.lineage(v).argument}
    makers = {v: i for i, node in enumerate(nodes) for v in node.equation.outvars}
    self.products = {v for node in nodes if _is_product(node) for v in node.equation.outvars}
    self.reads = [[makers[a] for a in variables_of(node.equation.invars) if a in makers] for node in nodes]
    self.readers: dict[Var, list[tuple[int, np.dtype | None]]] = {}  # (node, dtype) for each use
    for i, node in enumerate(nodes):
      for a, dtype in zip(node.equation.invars, node.reads, strict=True):
        if is_variable(a):
          self.readers.setdefault(a, []).append((i, dtype))

  def units(self) -> tuple[Node | Island, ...]:
    found = [(members, self._island(members)) for members in self._groups()]
    found = [(members, island) for members, island in found if self._pays(island)]
    taken = {i for members, _ in found for i in members}
    cheap = [
      self.place.copies
      and i not in taken
      and not _is_product(node)
      and self.rules.is_cheap(node.equation, node.path)
      for i, node in enumerate(self.nodes)
    ]
    copies = Copies(self.nodes, cheap, self.held)
    islands = [(members, self._finished(island, copies)) for members, island in found]
    for i, node in enumerate(self.nodes):
      alone = None if i in taken else self._alone(node, copies)
      if alone is not None:
        islands.append(([i], alone))
    return self._ordered(islands)

  def _alone(self, node: Node, copies: Copies) -> Island | None:
    """Returns a half-precision equation as its own island, if it would keep a copy of a parameter."""
    # A product's result is saved.
    again = _is_product(node) or is_exact_product(node) or self.rules.may_recompute(node.equation)
    if not again or not self.rules.computes_again(node.path):
      return None
    return making_operands_again(node, copies, self.arguments, self.held)

  def _finished(self, island: Island, copies: Copies) -> Island:
    """Returns an island with its copies, its barrier and its FP8 format."""
    copied = copies.instead_of([v for v, _ in island.inputs])
    inputs = self._inputs((*copied, *island.nodes))
    island = dataclasses.replace(island, copies=copied, inputs=inputs)
    # If the backward pass follows at once, a compiler that keeps the inside keeps it only briefly; from one
    # loop to another it keeps only what it is told to.
    fenced = not self.place.in_loop and self._followed(v for v, _ in island.outputs)
    saved = _saved_dtype(island, self.rules) if self._before_the_last_product(island) else None
    return dataclasses.replace(island, fenced=fenced, saved=saved)

  def _before_the_last_product(self, island: Island) -> bool:
    """Returns whether a product follows the one that reads an island's outputs."""
    if self.roles is None:
      return False
    made = [v for v, _ in island.outputs]
    if not any(map(_is_product, island.nodes)):
      readers = {i for v in made for i, _ in self.readers.get(v, ())}
      made = [v for v in made if v in self.jaxpr.outvars]
      made += [v for i in readers for v in self.nodes[i].equation.outvars]
    return any(map(self.roles.reaches_product, made))

  def _followed(self, variables: Iterable[Var]) -> bool:
    """Returns whether a matrix product comes after some variables in the whole program, or may."""
    return self.roles is None or any(map(self.roles.is_followed, variables))

  def _groups(self) -> list[list[int]]:
    """Returns connected equations of one level, and the products that read them.

    The last product is left out: it is the largest array of a language model, and the gradient of an island's
    result crosses a barrier, where it must exist in memory.

    Every value that leaves an island raises the level, also a product's result, so that no path returns to
    one.
    """
    inside, reads = self.inside, self.reads
    ends = [
      _is_product(node) and any(inside[j] for j in before) and self._followed(node.equation.outvars)
      for node, before in zip(self.nodes, reads, strict=True)
    ]
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
    return list(groups.values())

  def _inputs(self, nodes: Sequence[Node]) -> tuple[tuple[Var, np.dtype], ...]:
    """Returns the inputs of some nodes together, with their dtypes."""
    own = {v for node in nodes for v in node.equation.outvars}
    read = dict.fromkeys(a for node in nodes for a in variables_of(node.equation.invars) if a not in own)
    return tuple((a, held_dtype(a, self.held)) for a in read)

  def _island(self, members: list[int]) -> Island:
    nodes = tuple(self.nodes[i] for i in members)
    outputs: dict[tuple[Var, np.dtype], None] = {}
    within = set(members)
    for node in nodes:
      for v in node.equation.outvars:
        outside = [dtype for i, dtype in self.readers.get(v, ()) if i not in within]
        if castable(v.aval):
          outputs.update({(v, dtype): None for dtype in self._read_as(v, outside)})
        elif outside or v in self.jaxpr.outvars:
          outputs[v, dtype_of(v)] = None
    return Island(nodes, self._inputs(nodes), tuple(outputs))

  def _read_as(self, v: Var, outside: Sequence[np.dtype | None]) -> list[np.dtype]:
    """Returns the dtypes in which a result is read outside."""
    held = self.held[v]
    # A float32 reader widens a product's result itself. For a value from no product the rounding would be an
    # error.
    halves = [] if held.kind is Kind.HALF else [dtype for dtype in outside if dtype != held.dtype]
    wanted = dict.fromkeys(halves)
    if len(halves) < len(outside):
      wanted[held.dtype] = None
    for atom, out in zip(self.jaxpr.outvars, self.outs, strict=True):
      if atom is v:
        wanted[out.dtype] = None
    return [dtype for dtype in wanted if dtype is not None]

  def _pays(self, island: Island) -> bool:
    """Returns whether an island saves more than it keeps."""
    nodes = [node for node in island.nodes if node.mode is Mode.FULL]
    own = {v for node in island.nodes for v in node.equation.outvars}
    # Other operands of the products at its end are saved with or without the island.
    read = {a for node in nodes for a in variables_of(node.equation.invars)}
    half = max((size(v) for v in read - own if self._follows_product(v)), default=0)
    if not half and all(self.rules.is_cheap(node.equation, node.path) for node in nodes):
      return False  # one-hots and their products: their readers may compute them
      # Before the first product nothing is half yet: an embedding and the norm after it.
    narrow = any(size(v) > 1 for v, dtype in island.outputs if dtype != FLOAT32 and castable(v.aval))
    if half <= 1 and not narrow:
      return False
    heavy = (node for node in nodes if not has(node.equation, Trait.NO_RESIDUAL))
    return any(2 * size(a) >= max(half, 2) for node in heavy for a in node.equation.invars)

  def _follows_product(self, v: Var) -> bool:
    """Returns whether a value is half precision, or the float32 result of a half-precision product."""
    return self.held[v].kind is Kind.HALF or v in self.products

  def _ordered(self, islands: Sequence[tuple[list[int], Island]]) -> tuple[Node | Island, ...]:
    """Returns nodes and islands in an order as close to the program's as possible; effects keep theirs."""
    unit_of: dict[int, int] = {}
    units: list[Node | Island] = []
    for members, island in islands:
      unit_of |= dict.fromkeys(members, len(units))
      units.append(island)
    for i, node in enumerate(self.nodes):
      if i not in unit_of:
        unit_of[i] = len(units)
        units.append(node)
    first = [math.inf] * len(units)
    after: list[set[int]] = [set() for _ in units]
    waits: list[set[int]] = [set() for _ in units]
    effect = None
    for i, node in enumerate(self.nodes):
      unit = unit_of[i]
      first[unit] = min(first[unit], i)
      before = {unit_of[j] for j in self.reads[i]}
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
    return tuple(ordered)


def is_statistic(
  primitive: Primitive, operands: Sequence[AbstractValue], parameters: Mapping[str, Any]
) -> bool:
  """Returns whether an equation reduces each row, of at least 32, to one number, which an island saves.

  The backward pass then reads the rows once, as a fused norm or attention does, instead of once per number.
  """
  if not facts(primitive).traits & Trait.STORES_RESULT or "axes" not in parameters:
    return False
  shape = getattr(operands[0], "shape", ())
  return math.prod(d if isinstance(d, int) else 1024 for d in (shape[i] for i in parameters["axes"])) >= 32


def statistics_bytes(equation: JaxprEqn) -> int:
  """Returns the bytes of the statistics that an island saves of an equation and its bodies."""
  if is_statistic(equation.primitive, [a.aval for a in equation.invars], equation.params):
    return sum(4 * size(v) for v in equation.outvars)
  return sum(statistics_bytes(inner) for body in bodies_of(equation) for inner in open_jaxpr(body).eqns)


def _saved_dtype(island: Island, rules: CastingRules) -> np.dtype | None:
  """Returns the FP8 format in which an island's inputs may be kept; `None`: half precision.

  `None` if there is an exponential: a rounding error there is an error of the exponent.
  """
  recipe = rules.overrides.recipe_at(island.nodes[0].path)
  if recipe is None or recipe.saved_activations != "fp8" or not _fp8_products.works(recipe):
    return None
  inside = rules.primitives([node.equation for node in island.nodes])
  exponential = any(has(primitive, Trait.EXPONENTIAL) for primitive in inside)
  return None if exponential else recipe.forward
