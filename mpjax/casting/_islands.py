"""Islands: float32 equations that are computed together, from half-precision inputs to outputs.

An island is emitted as one `jax.checkpoint`, so that the backward pass keeps its inputs, in
half precision, and not its inside, in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import AbstractValue
from jax.extend.core import Primitive, primitives

from mpjax._types import JaxprEqn, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import CastPlan, Island, Mode, Node
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, is_float, size
from mpjax.casting._program import BodyFacts, Reads
from mpjax.casting._reasons import EXACT, Code
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

_KEEPS_NONE = Trait.NO_RESIDUAL | Trait.CHOICE
_DEAR = Trait.COSTLY | Trait.READS_STORED | Trait.STORES_RESULT
_STORED = Trait.READS_STORED | Trait.STORES_RESULT | Trait.MOVES | Trait.PRODUCT


def pull_in(
  decisions: Sequence[Node], held: dict[Var, Held], results: set[Var], full_outputs: bool
) -> list[Node]:
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
  sources = _sources(decisions, held)
  users: dict[Var, list[Node]] = {}
  found = []
  for made in reversed(decisions):
    equation = made.equation
    readers = [users.get(v, []) for v in equation.outvars]
    if _only_float32_reads(made, readers, results, full_outputs) and not _better_saved(made, held, sources):
      own = Held(Kind.ISLAND, FLOAT32)
      outs = tuple(own if castable(v.aval) else initial(v.aval) for v in equation.outvars)
      code = Code.ONLY_FLOAT32
      made = Node(equation, made.path, "infer", Mode.FULL, made.half, code, outs)
      held.update(zip(equation.outvars, outs, strict=True))
    for atom in variables_of(equation.invars):
      users.setdefault(atom, []).append(made)
    found.append(made)
  return found[::-1]


def _only_float32_reads(
  made: Node, readers: Sequence[list[Node]], results: set[Var], full_outputs: bool
) -> bool:
  if made.mode not in (Mode.HALF, Mode.ENTER) or made.listed not in ("infer", "call"):
    return False
  if made.mode is Mode.ENTER and (call_kind(made.equation) is not CallKind.JIT or made.has_product()):
    return False
  returned = any(v in results for v in made.equation.outvars)
  if (returned and not full_outputs) or not (returned or any(readers)):
    return False
  return all(r.mode is Mode.FULL and r.listed in ("deny", "infer") for rs in readers for r in rs)


def _better_saved(made: Node, held: Mapping[Var, Held], sources: Mapping[Var, Var]) -> bool:
  """Returns whether a result is smaller to save than its inputs, or costs a memory pass to recompute.

  It is smaller if it adds two values of full size, or chooses between them. What has a name
  (`jax.ad_checkpoint.checkpoint_name`) may be saved by it, in half the bytes of float32.
  """
  equation, halves = made.equation, _halves(made, held)
  if equation.primitive is primitives.name_p or has(equation, Trait.MOVES):
    return True
  if max(map(size, halves), default=0) > max(map(size, equation.outvars)):
    return True
  largest = max(map(size, equation.invars))
  full = {sources.get(a, a) for a in halves if size(a) == largest}
  return has(equation, Trait.CHOICE) and len(full) > 1


def _sources(decisions: Sequence[Node], held: Mapping[Var, Held]) -> dict[Var, Var]:
  """Returns, by variable, the only half value that it is an elementwise function of."""
  found: dict[Var, Var] = {}
  for made in decisions:
    if made.mode is Mode.HALF and made.listed == "infer" and not has(made.equation, Trait.MOVES):
      sources = {found.get(a, a) for a in _halves(made, held)}
      if len(sources) == 1:
        found.update(dict.fromkeys(made.equation.outvars, sources.pop()))
  return found


def _halves(made: Node, held: Mapping[Var, Held]) -> list[Var]:
  return [a for a in made.equation.invars if is_variable(a) and held[a].kind is Kind.HALF]


def _in_float32(node: Node) -> bool:
  """Returns whether an equation is float32, or made of integers: a one-hot, a mask of positions."""
  if node.mode in (Mode.KEEP, Mode.CAST):
    return not any(is_float(a.aval) for a in node.equation.invars)
  if node.mode is Mode.EACH:  # a change of weak type, for example
    return len(node.outs) == 1 and node.outs[0].kind is not Kind.FIXED and node.outs[0].dtype == FLOAT32
  return node.mode is Mode.FULL and node.listed != "allow"


def _is_product(node: Node) -> bool:
  return node.listed == "allow" and node.mode is Mode.HALF


class Segments:
  """A program that is cut into islands, and what is in none of them.

  Args:
    plan: the program, decided about.
    known: what is known of it.
    rules: the rules.
    in_loop: whether it is a step of a `scan`, whose backward pass is another loop.
  """

  def __init__(self, plan: CastPlan, known: BodyFacts, rules: CastingRules, in_loop: bool):
    self.jaxpr, self.nodes, self.held, self.outs = plan.jaxpr, plan.nodes, plan.held, plan.outs
    self.known, self.rules, self.in_loop, nodes = known, rules, in_loop, plan.nodes
    self.arguments = {v for v in plan.inputs if known.layers is not None and known.layers[v].argument}
    recomputed = (node for node in nodes if rules.may_recompute(node.equation))
    self.inside = {node for node in recomputed if _in_float32(node) and rules.computes_again(node.path)}
    self.makers = {v: node for node in nodes for v in node.equation.outvars}
    self.made_of_arguments: dict[Var, list[Node] | None] = {}  # see `_made_of_arguments`
    self.readers: dict[Var, list[tuple[Node, np.dtype | None]]] = {}  # and the dtype of each use
    for node in nodes:
      for a, dtype in zip(node.equation.invars, node.reads, strict=True):
        if is_variable(a):
          self.readers.setdefault(a, []).append((node, dtype))

  def units(self) -> tuple[Node | Island, ...]:
    """Returns the decisions in an order in which they can be executed, islands as one."""
    units: list[Node | Island] = []
    for nodes in self._cut():
      island = None if self.inside.isdisjoint(nodes) else self._island(nodes)
      units += [island] if island is not None else [self._alone(node) or node for node in nodes]
    return tuple(units)

  def _cut(self) -> list[list[Node]]:
    """Returns the program in an order of execution: segments, and what is in none, each alone.

    A segment is connected equations of the inside, and products that read them, its ends. It is open until
    something outside it, or something behind one of its ends, reads a result. Then it stands before that, and
    no path returns to it. What has fewer segments before it comes first, so that all ends that read a segment
    are in it.

    The last product is left out: it is the largest array of a language model, and the gradient of an island's
    result crosses a barrier, where it must exist in memory.
    """
    nodes = self.nodes
    makers = {v: i for i, node in enumerate(nodes) for v in node.equation.outvars}
    reads = [[makers[a] for a in variables_of(node.equation.invars) if a in makers] for node in nodes]
    inside = [node in self.inside for node in nodes]
    ends = [
      _is_product(node) and any(inside[j] for j in read) and self._followed(node.equation.outvars)
      for node, read in zip(nodes, reads, strict=True)
    ]
    for earlier, i in itertools.pairwise(i for i, node in enumerate(nodes) if node.equation.effects):
      reads[i].append(earlier)
    member = [here or end for here, end in zip(inside, ends, strict=True)]
    before = [0] * len(nodes)  # segments
    for i, read in enumerate(reads):
      before[i] = max((before[j] + (ends[j] or (inside[j] and not member[i])) for j in read), default=0)
    closed: list[list[int]] = []
    open_at: dict[int, list[int]] = {}  # the open segment of each member
    for i in sorted(range(len(nodes)), key=before.__getitem__):
      for j in reads[i]:
        if j in open_at and (ends[j] or not member[i]):
          closed.append(open_at[j])
          for k in closed[-1]:
            del open_at[k]
      if not member[i]:
        closed.append([i])
        continue
      joined = {id(open_at[j]): open_at[j] for j in reads[i] if j in open_at}.values()
      segment = max(joined, key=len, default=[])
      for other in joined:
        if other is not segment:
          segment += other
          open_at.update(dict.fromkeys(other, segment))
      segment.append(i)
      open_at[i] = segment
    left = {id(segment): segment for segment in open_at.values()}
    return [[nodes[i] for i in sorted(segment)] for segment in (*closed, *left.values())]

  def _alone(self, node: Node) -> Island | None:
    """Returns an equation as an island whose backward pass casts or broadcasts arguments again; or `None`.

    In one program a compiler shares the copy between the two passes; from one loop to another it is not kept.
    """
    equation, exact = node.equation, node.code in EXACT
    if node.half is None or node.fp8 is not None or not (node.mode is Mode.HALF or exact):
      return None
    if bodies_of(equation) or has(equation, _KEEPS_NONE) or not self.rules.computes_again(node.path):
      return None
    if not (_is_product(node) or exact or self.rules.may_recompute(equation)):  # a product's result is saved
      return None
    read = dict.fromkeys(variables_of(equation.invars))
    flexible = [v for v in read if castable(v.aval) and self.held[v].kind is Kind.FLEXIBLE and size(v) > 1]
    widened = {equation.invars[i] for i in node.widened}
    wide = {v for v in flexible if v in widened or v in self.arguments}
    made = [one for v in flexible if v not in wide for one in self._made_of_arguments(v) or ()]
    if not wide and not made:
      return None
    copies = tuple(dict.fromkeys(made))
    of_copies = {v for one in copies for v in variables_of(one.equation.invars)}
    dtype = node.half if node.mode is Mode.HALF else FLOAT32
    inputs = dict(self._inputs((*copies, node)))
    inputs |= {v: dtype for v in inputs if castable(v.aval) and v not in wide and v not in of_copies}
    # A product's gradient goes to the float32 value, which is not kept for it.
    originals = [(v, FLOAT32) for v in node.originals().values() if inputs.get(v, FLOAT32) != FLOAT32]
    outputs = tuple((v, held_dtype(v, self.held)) for v in equation.outvars)
    return Island((node,), (*inputs.items(), *originals), outputs, copies, fenced=False)

  def _made_of_arguments(self, v: Var) -> list[Node] | None:
    """Returns what makes a value of arguments alone, and is cheap; `None` if nothing does."""
    if v not in self.made_of_arguments:
      self.made_of_arguments[v] = None if v not in self.arguments else []
      node = self.makers.get(v)
      if node is not None and self._is_cheap(node):
        before = [self._made_of_arguments(a) for a in variables_of(node.equation.invars)]
        if None not in before:
          self.made_of_arguments[v] = [*(one for nodes in before for one in nodes or ()), node]
    return self.made_of_arguments[v]

  def _is_cheap(self, node: Node) -> bool:
    """Returns whether computing an equation again costs no more than reading its result."""
    primitives = self.rules.primitives([node.equation])
    dear = any(facts(p).traits & _DEAR or self.rules.list_of(p) in ("allow", "deny") for p in primitives)
    custom = any(row.call is not None and row.call.is_custom_rule for row in map(facts, primitives))
    again = self.rules.computes_again(node.path) and self.rules.may_recompute(node.equation)
    return again and not dear and not custom

  def _compared(self, island: Island) -> Var | None:
    """Returns the product's result that an island, a loss by element, compares with targets; or `None`."""
    for v, _ in island.inputs:
      made = self.makers.get(v)
      if made is None or not _is_product(made) or made.fp8 or not has(made.equation, Trait.PRODUCT):
        continue
      active = (a for a in variables_of(made.equation.invars) if self.held[a].kind is not Kind.FLEXIBLE)
      targets = (other for other, _ in island.inputs if other is not v and size(other) >= size(v))
      smaller = all(size(a) <= size(v) for a in active)
      if smaller and any(targets) and is_by_element(island.nodes, v, self.rules):
        return v
    return None

  def _before_the_last_product(self, island: Island) -> bool:
    """Returns whether a product follows the one that reads an island's outputs."""
    made = [v for v, _ in island.outputs]
    if not any(map(_is_product, island.nodes)):
      readers = {node for v in made for node, _ in self.readers.get(v, ())}
      made = [v for v in made if v in self.jaxpr.outvars]
      made += [v for node in readers for v in node.equation.outvars]
    return any(self.known.end(v) & Reads.PRODUCT for v in made)

  def _followed(self, variables: Iterable[Var]) -> bool:
    """Returns whether a matrix product comes after some variables in the whole program, or may."""
    if self.known.layers is None:
      return True
    return any(self.known.end(v) & (Reads.PRODUCT | Reads.ARRAY) for v in variables)

  def _inputs(self, nodes: Sequence[Node]) -> tuple[tuple[Var, np.dtype], ...]:
    """Returns the inputs of some nodes together, with their dtypes."""
    own = {v for node in nodes for v in node.equation.outvars}
    read = dict.fromkeys(a for node in nodes for a in variables_of(node.equation.invars) if a not in own)
    return tuple((a, held_dtype(a, self.held)) for a in read)

  def _island(self, nodes: Sequence[Node]) -> Island | None:
    """Returns an island of some equations, with its barrier and its FP8 format.

    `None` if it does not pay.
    """
    outputs: dict[tuple[Var, np.dtype], None] = {}
    within, made = set(nodes), dict.fromkeys(v for node in nodes for v in node.equation.outvars)
    for v in made:
      outside = [dtype for node, dtype in self.readers.get(v, ()) if node not in within]
      if castable(v.aval):
        outputs.update({(v, dtype): None for dtype in self._read_as(v, outside)})
      elif outside or v in self.jaxpr.outvars:
        outputs[v, dtype_of(v)] = None
    island = Island(tuple(nodes), self._inputs(nodes), tuple(outputs))
    if not self._pays(island, made):
      return None
    # If the backward pass follows at once, a compiler that keeps the inside keeps it only briefly; from one
    # loop to another it keeps only what it is told to.
    followed = self._followed(v for v, _ in island.outputs)
    fenced = not self.in_loop and followed
    saved = _saved_dtype(island, self.rules) if self._before_the_last_product(island) else None
    loss_of = None if self.in_loop or followed else self._compared(island)
    parts = self._parts(island) if fenced else ()
    return dataclasses.replace(island, fenced=fenced, saved=saved, loss_of=loss_of, parts=parts)

  def _parts(self, island: Island) -> tuple[Node | Island, ...]:
    """Returns what an island makes of arguments, what products at its end read, as an island, and these.

    The backward pass computes that island, and the derivative of it, apart: from one computation of both, XLA
    for a GPU keeps the inside in float32. Nothing is apart without such products, nor if statistics are saved
    inside, which would be computed twice.
    """
    ends = [node for node in island.nodes if node.listed == "allow"]
    if not ends or any(statistics_bytes(node.equation) for node in island.nodes):
      return ()
    moving = {v for v, _ in island.inputs if castable(v.aval) and self.held[v].kind is not Kind.FLEXIBLE}
    first: list[Node] = []
    others: list[Node] = []
    for node in (node for node in island.nodes if node.listed != "allow"):
      depends = not moving.isdisjoint(variables_of(node.equation.invars))
      moving.update(node.equation.outvars if depends else ())
      (others if depends else first).append(node)
    if not others:
      return ()
    wanted = {v for node in others for v in variables_of(node.equation.invars)}
    before = (*island.inputs, *((v, held_dtype(v, self.held)) for n in first for v in n.equation.outvars))
    inputs = tuple((v, dtype) for v, dtype in before if v in wanted)
    made = {v for node in others for v in node.equation.outvars}
    read = [
      (a, FLOAT32 if i in node.own_casts | node.widened else dtype or dtype_of(a))
      for node in ends
      for i, (a, dtype) in enumerate(zip(node.equation.invars, node.reads, strict=True))
      if is_variable(a)
    ]
    outputs = tuple(dict.fromkeys((v, dtype) for v, dtype in (*read, *island.outputs) if v in made))
    return (*first, Island(tuple(others), inputs, outputs), *ends)

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

  def _pays(self, island: Island, made: Collection[Var]) -> bool:
    """Returns whether an island reads half precision, or makes it by something costly: not a one-hot."""
    equations = [node.equation for node in island.nodes if node.mode is Mode.FULL]
    if all(has(equation, Trait.NO_RESIDUAL) for equation in equations):
      return False
    read = (v for equation in equations for v in variables_of(equation.invars))
    if any(size(v) > 1 and v not in made and self._follows_product(v) for v in read):
      return True
    # Before the first product nothing is half yet: an embedding and the norm after it.
    narrow = any(size(v) > 1 for v, dtype in island.outputs if dtype != FLOAT32 and castable(v.aval))
    return narrow and any(facts(p).traits & _DEAR for p in self.rules.primitives(equations))

  def _follows_product(self, v: Var) -> bool:
    """Returns whether a value is half precision, or the float32 result of a half-precision product."""
    return self.held[v].kind is Kind.HALF or (v in self.makers and _is_product(self.makers[v]))


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
  if recipe is None or recipe.saved_activations != "fp8" or _fp8_products.support(recipe)[0]:
    return None
  inside = rules.primitives([node.equation for node in island.nodes])
  exponential = any(has(primitive, Trait.EXPONENTIAL) for primitive in inside)
  return None if exponential else recipe.forward


def held_dtype(v: Var, held: Mapping[Var, Held]) -> np.dtype:
  """Returns the dtype that a variable is held in."""
  return held[v].dtype if castable(v.aval) else dtype_of(v)


def is_by_element(nodes: Sequence[Node], result: Var, rules: CastingRules) -> bool:
  """Returns whether equations use each element of a value alone, until they sum.

  A product's fused epilogue can compute such a loss and its gradient at once, without storing the result of
  the product: a squared error, a cross entropy of independent logits. Compilers store it anyway, and both
  products of the backward pass recompute the gradient from it, and read the targets again. So the gradient
  crosses an optimisation barrier: it is computed and stored once. A softmax first needs its whole rows: its
  result is stored anyway, and a barrier would store another array. A barrier does not pay either if the
  result is small compared with the product's operands.
  """
  made = {result}  # and what is made of it
  for equation in (node.equation for node in nodes):
    read = made & set(variables_of(equation.invars))
    made.update(equation.outvars if read else ())
    if read and any(size(v) >= size(result) for v in equation.outvars):
      stored = any(facts(p).traits & _STORED for p in rules.primitives([equation]))
      if stored or any(size(v) < size(result) for v in read):
        return False
  return True
