"""A program, with the facts that its decisions ask about its values and products, each found once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

from mpjax._types import AnyJaxpr
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._fp8_products import Sites
from mpjax.casting._kinds import castable, is_float
from mpjax.casting._loops import why_in_solver
from mpjax.casting._product_roles import ProductRole, product_roles
from mpjax.casting._readers import Ends, EndsOfValues, Readers, Reads
from mpjax.casting._sources import Lineage, Lineages, Product, Root, in_backward, products, sources
from mpjax.jaxpr import CallKind, Calls, Facts, call_kind, open_jaxpr, shape_of

F = TypeVar("F")


class Program:
  """Facts about a program and the bodies of its calls, by the calls around each; what is missing is unknown.

  Attributes:
    rules: the rules.
    lineages: where its values come from.
    ends: what follows them.
    reads: their readers.
    readers: finds those of a body whose readers outside are unknown; and why products keep float32 operands.
    exact: the products of backward passes whose forward products all keep float32 operands, and `while` loops
      of them, which repeat the steps of a solver.
    parameters: the sources that are parameters.
    sites: the names of products under delayed FP8 scaling so far.
  """

  def __init__(self, rules: CastingRules, sites: Sites):
    self.rules = rules
    self.lineages: dict[Calls, Facts[Lineage]] = {}
    self.ends: dict[Calls, Facts[Ends]] = {}
    self.reads: dict[Calls, Facts[Reads]] = {}
    self.readers = Readers(rules, self.lineages, self.ends)
    self.exact: frozenset[Calls] = frozenset()
    self.parameters = 0
    self.sites = sites
    self._products: list[Product] = []

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, arguments: Sequence[int], full_outputs: bool) -> Program:
    """Returns a whole program.

    Args:
      jaxpr: the program.
      rules: the rules.
      arguments: for each of its inputs, the number of the argument that it is a leaf of.
      full_outputs: whether its outputs are read in float32.
    """
    program, outputs = cls(rules, Sites()), open_jaxpr(jaxpr).outvars
    lineages, program.parameters = sources(jaxpr, rules, arguments)
    _add(lineages, program.lineages)
    ends = [Ends.ARRAY if shape_of(v) else Ends.SCALAR for v in outputs]
    ends = [end if is_float(v.aval) else Ends.NONE for end, v in zip(ends, outputs, strict=True)]
    _add(EndsOfValues(rules).solve(jaxpr, ends), program.ends)
    returned = Reads.FLOAT32 if full_outputs else Reads.HALF
    reads = [returned if castable(v.aval) else Reads.NONE for v in outputs]
    _add(program.readers.solve(jaxpr, reads), program.reads)
    program._products = list(products(lineages, rules))
    program.exact = program._backward_of_exact()
    return program

  def of_rule(self, jaxpr: AnyJaxpr, calls: Calls, is_backward: bool) -> Program:
    """Returns a derivative rule of a call as a program: it first returns the call's results.

    Args:
      jaxpr: the rule.
      calls: the calls around it; the last is its own.
      is_backward: whether it is a backward rule, about which nothing is known.
    """
    rule, outer = Program(self.rules, self.sites), calls[:-1]
    if is_backward or outer not in self.lineages or outer not in self.reads:
      return rule
    call, body = calls[-1][0], open_jaxpr(jaxpr)
    operands = [self.lineages[outer][a] for a in call.invars][: len(body.invars)]
    tangents = [Lineage(False, True, None, real=True)] * (len(body.invars) - len(operands))
    _add(Lineages(self.rules).solve(jaxpr, [*operands, *tangents], calls), rule.lineages)
    results = [self.reads[outer][v] for v in call.outvars][: len(body.outvars)]
    others = [Reads.NONE] * (len(body.outvars) - len(results))
    _add(rule.readers.solve(jaxpr, [*results, *others], calls), rule.reads)
    return rule

  @functools.cached_property
  def roles(self) -> dict[Calls, ProductRole]:
    """The roles of its products, by their place."""
    return product_roles(self._products, self.ends)

  def _backward_of_exact(self) -> frozenset[Calls]:
    """Returns `exact`.

    The forward products of a backward product are those that share an operand with it. A product in a
    `while_loop` has them, too: the derivative of a solver may be a loop that repeats its steps.
    """
    forward: dict[Root, list[bool]] = {}
    backward: dict[Calls, list[Root]] = {}
    for place, operands in self._products:
      *calls, (equation, _) = place
      solver = why_in_solver(place[:-1], self.rules) is not None
      roots = [fact.root for fact in operands if fact.root is not None and not fact.gradient]
      in_loop = any(call_kind(call) is CallKind.WHILE for call, _ in calls)
      if in_backward(equation, place[:-1]) or (in_loop and not solver):
        backward[place] = roots
        continue
      exact = solver or self.readers.float32.get(place) is not None
      for root in roots:
        forward.setdefault(root, []).append(exact)
    alike = {place: [e for root in roots for e in forward.get(root, ())] for place, roots in backward.items()}
    known = {place: all(found) for place, found in alike.items() if found}
    loops: dict[Calls, bool] = {}
    for place, is_exact in known.items():
      for i, (call, _) in enumerate(place[:-1]):
        if call_kind(call) is CallKind.WHILE:
          loop = (*place[:i], (call, 0))
          loops[loop] = loops.get(loop, True) and is_exact
    return frozenset(place for place, is_exact in (known | loops).items() if is_exact)


def _add(found: Facts[F], known: dict[Calls, Facts[F]]) -> None:
  known.update((facts.calls, facts) for facts in found.everywhere())
