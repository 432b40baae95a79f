"""Roles of a program's matrix products: the first, the last, of a weight, of two activations.

A forward pass over the program finds what comes after a layer (a product, or a lookup in a table), and a
backward one what comes before a product; both enter the bodies of higher-order primitives, call by call.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.jaxpr import (
  CallKind,
  Trait,
  alignment,
  backward_depth,
  call_kind,
  has,
  is_variable,
  live,
  open_jaxpr,
  scan_parts,
  shape_of,
  variables_of,
  while_parts,
)

Root: TypeAlias = tuple[Hashable, Hashable]  # what identifies a value behind reshapes and calls

_NUMBERS = itertools.count()
_STACKED = "stacked"  # what a scan collects of a value


class Lineage(NamedTuple):
  """The facts about a value that the role of a product follows from.

  Attributes:
    active: whether a layer came before it.
    varies: whether it depends on an input or an array that the program closes over.
    root: what identifies it behind reshapes and calls; `None` for what is made of literals.
    gradient: whether it was computed in a backward pass, from what flows there.
    argument: whether it is an argument of the whole program or an array that it closes over, or a row of one.
  """

  active: bool
  varies: bool
  root: Root | None
  gradient: bool = False
  argument: bool = False

  def join(self, other: Lineage) -> Lineage:
    """Returns what is known of a value that may be either."""
    root = other.root if self.root is None else self.root
    return Lineage(
      self.active or other.active, self.varies or other.varies, root, self.gradient or other.gradient
    )


class ProductRole(NamedTuple):
  """The role of a matrix product in its program.

  Attributes:
    active: which of its operands come after a layer.
    gradients: which of its operands are gradients, in a backward pass inside the program.
    roots: what identifies its operands.
    size: elements of its result; of the gradient operand, in a backward pass.
    last: whether no product follows it.
  """

  active: tuple[bool, bool]
  gradients: tuple[bool, bool]
  roots: tuple[Root | None, Root | None]
  size: int
  last: bool = False

  @property
  def first(self) -> bool:
    """True if no layer came before it."""
    return not any(self.active)


class ProductRoles:
  """The products of a jaxpr, as it is called here, and those of its bodies.

  Those of a backward pass inside the program are what the forward ones are that they come from.

  Attributes:
    products: by equation (its id).
    inner: for each higher-order equation (its id), those of its bodies, by body (its id).
    reaching: variables that a product comes after.
    followed: those, and the ones that an array which the program returns is made of: what comes after that is
      not known. After a scalar nothing is taken to come.
    scored: variables that a scalar which the program returns is made of.
    arguments: inputs that are arguments of the whole program, or rows of them in a loop.
  """

  def __init__(self, jaxpr: AnyJaxpr, facts: Sequence[Lineage], rules: CastingRules, behind: bool = False):
    self._jaxpr = open_jaxpr(jaxpr)
    self._rules = rules
    self._number = next(_NUMBERS)
    self._behind = behind
    self.products: dict[int, ProductRole] = {}
    self.inner: dict[int, dict[int, ProductRoles]] = {}
    self.reaching: set[Var] = set()
    self.followed: set[Var] = set()
    self.scored: set[Var] = set()
    self._facts: dict[Var, Lineage] = {}
    inputs = [*self._jaxpr.constvars, *self._jaxpr.invars]
    missing = len(inputs) - len(facts)
    constants = [Lineage(False, True, (id(v), "constant"), argument=True) for v in inputs[:missing]]
    self._facts.update(zip(inputs, [*constants, *facts], strict=True))
    self.arguments = {v for v in inputs if self._facts[v].argument}
    self._equations = live(self._jaxpr).equations
    for equation in self._equations:
      self._forward(equation)
    self.outs = [self._fact(v) for v in self._jaxpr.outvars]

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules) -> ProductRoles:
    """Returns the roles of the products of a whole program."""
    body = open_jaxpr(jaxpr)
    inputs = [Lineage(False, True, input_root(i), argument=True) for i in range(len(body.invars))]
    layers = cls(body, inputs, rules)
    scalars = [is_float(v.aval) and not shape_of(v) for v in body.outvars]
    arrays = [is_float(v.aval) and bool(shape_of(v)) for v in body.outvars]
    layers.backward(scalars)
    for part in layers._parts():
      part.scored = part.reaching
    layers.backward(arrays)
    for part in layers._parts():
      part.followed = part.reaching
    layers.backward([False] * len(arrays))
    layers._inherit(_readers(layers._forward_products(behind=False)), gradients=False)
    layers._inherit(_readers(layers._forward_products(behind=True)), gradients=True)
    return layers

  def _parts(self) -> Iterator[ProductRoles]:
    """Yields these, and those of the bodies of higher-order primitives."""
    yield self
    for bodies in self.inner.values():
      for layers in bodies.values():
        yield from layers._parts()

  def _forward_products(self, behind: bool) -> Iterator[ProductRole]:
    """Yields products that are of no gradient; `behind`: also those that a backward pass computes again."""
    if behind or not self._behind:
      yield from (product for product in self.products.values() if not any(product.gradients))
    for bodies in self.inner.values():
      for layers in bodies.values():
        yield from layers._forward_products(behind)

  def _inherit(self, readers: Mapping[Root | None, list[ProductRole]], gradients: bool) -> None:
    """Gives products of a backward pass what is known of the forward ones that they come from.

    Args:
      readers: the forward products by what identifies their operands.
      gradients: those of gradients, rather than those that are computed again.
    """
    for key, product in list(self.products.items()):
      if any(product.gradients) != gradients or not (self._behind or gradients):
        continue
      roots = [root for root, gradient in zip(product.roots, product.gradients, strict=True) if not gradient]
      forward = [p for root in roots for p in readers.get(root, [])]
      forward = [p for p in forward if p.size == product.size] or forward
      if not forward or all(product.gradients):
        del self.products[key]
        continue
      last = any(p.last for p in forward)
      active = product.active  # of one that is computed again
      if any(product.gradients):
        active = (all(p.active[0] for p in forward), all(p.active[1] for p in forward))
      self.products[key] = product._replace(active=active, last=last)
    for bodies in self.inner.values():
      for layers in bodies.values():
        layers._inherit(readers, gradients)

  def is_active(self, atom: Atom) -> bool:
    """Returns whether a layer came before a value."""
    return self._fact(atom).active

  def is_gradient(self, atom: Atom) -> bool:
    """Returns whether a value was computed in a backward pass, from what flows there."""
    return self._fact(atom).gradient

  def _fact(self, atom: Atom) -> Lineage:
    return self._facts[atom] if is_variable(atom) else Lineage(False, False, None)

  def _forward(self, equation: JaxprEqn) -> None:
    facts = [self._fact(a) for a in equation.invars]
    active, varies = any(f.active for f in facts), any(f.varies for f in facts)
    gradient = any(f.gradient for f in facts) or backward_depth(equation) > 0
    constant = not any(map(is_variable, equation.invars))
    outs = [
      Lineage(active, varies, None if constant else (self._number, id(v)), gradient) for v in equation.outvars
    ]
    if self._rules.list_of(equation.primitive) == "call":
      outs = self._call(equation, facts) or outs
    elif len(facts) > 1 and is_layer(equation, self._rules):  # a user may allow an operation of one operand
      lhs, rhs = facts[:2]
      self.products[id(equation)] = ProductRole(
        active=(lhs.active, rhs.active),
        gradients=(lhs.gradient, rhs.gradient),
        roots=(lhs.root, rhs.root),
        size=size(equation.invars[0 if lhs.gradient else 1] if gradient else equation.outvars[0]),
      )
      if is_layer(equation, self._rules, of_matrices=True):
        outs = [fact._replace(active=True) for fact in outs]
    elif equation.primitive is jax.lax.gather_p and facts[1].varies:
      outs = [fact._replace(active=True) for fact in outs]
    elif has(equation, Trait.SAME_WEIGHT) and len(facts) == 1:
      outs = [facts[0]._replace(argument=False)]
    self._facts.update(zip(equation.outvars, outs, strict=True))

  def _call(self, equation: JaxprEqn, facts: list[Lineage]) -> list[Lineage] | None:
    kind = call_kind(equation)
    n = len(equation.outvars)
    bodies: dict[int, ProductRoles] = {}
    merged: list[Lineage] | None = None
    entering = list(facts)
    if kind is CallKind.SCAN:
      consts, carry, _ = scan_parts(equation)
      entering[consts + carry :] = [f._replace(root=_row(f.root)) for f in entering[consts + carry :]]
      first, loops = consts, carry
    elif kind is CallKind.WHILE:
      first, loops = sum(while_parts(equation)[2:]), n
    else:
      first, loops = 0, 0
    entering[first : first + loops] = [f._replace(argument=False) for f in entering[first : first + loops]]
    behind = self._behind or backward_depth(equation) > 0
    while True:  # until what goes round a loop is known
      bodies, merged = {}, None
      for body, indices in alignment(equation):
        layers = ProductRoles(body, [entering[i] for i in indices], self._rules, behind)
        bodies[id(open_jaxpr(body))] = layers
        if len(layers.outs) == n and not (kind is CallKind.WHILE and body is while_parts(equation).condition):
          pairs = zip(merged or layers.outs, layers.outs, strict=True)
          merged = [a.join(b) for a, b in pairs]
      before = entering[first : first + loops]
      joined = [a.join(b) for a, b in zip(before, merged or before, strict=False)]
      if joined == before:
        break
      entering[first : first + loops] = joined
    self.inner[id(equation)] = bodies
    if merged is None:
      return None
    if kind in (CallKind.SCAN, CallKind.WHILE):
      stacked = loops if kind is CallKind.SCAN else n
      roots: list[Root] = [(self._number, id(v)) for v in equation.outvars[:stacked]]
      roots += [(_STACKED, fact.root) for fact in merged[stacked:]]
      merged = [fact._replace(root=root) for fact, root in zip(merged, roots, strict=True)]
    return [fact._replace(argument=False) for fact in merged]

  def backward(self, reached: Sequence[bool]) -> list[bool]:
    """Marks the last products, given which outputs reach one; returns which inputs do."""
    pairs = zip(self._jaxpr.outvars, reached, strict=True)
    self.reaching = reaches = {v for v, is_reached in pairs if is_reached and is_variable(v)}
    for equation in reversed(self._equations):
      if backward_depth(equation):
        continue
      # What becomes an integer (argmax) carries no value on.
      out = [v in reaches and is_float(v.aval) for v in equation.outvars]
      sources = list(equation.invars) if any(out) else []
      if id(equation) in self.inner:
        sources = self._backward_call(equation, out)
      elif id(equation) in self.products:
        product = self.products[id(equation)]
        self.products[id(equation)] = product._replace(last=not any(out))
        if is_layer(equation, self._rules, of_matrices=True):
          sources = list(equation.invars)
      reaches.update(variables_of(sources))
    return [v in reaches for v in [*self._jaxpr.constvars, *self._jaxpr.invars]]

  def _backward_call(self, equation: JaxprEqn, out: list[bool]) -> list[Atom]:
    kind = call_kind(equation)
    found: set[int] = set()
    loops = 0
    if kind is CallKind.SCAN:
      consts, loops, _ = scan_parts(equation)
      first = consts
    elif kind is CallKind.WHILE:
      first, loops = sum(while_parts(equation)[2:]), len(out)
    known = False
    while True:
      for body, indices in alignment(equation):
        layers = self.inner[id(equation)].get(id(open_jaxpr(body)))
        if layers is None or len(layers.outs) != len(out):
          continue
        known = True
        reached = layers.backward(out)[-len(indices) :] if indices else []
        found.update(i for i, is_reached in zip(indices, reached, strict=True) if is_reached)
      before, out = out, [is_out or (i < loops and first + i in found) for i, is_out in enumerate(out)]
      if out == before:
        break
    if not known:
      return list(equation.invars) if any(out) else []
    return [equation.invars[i] for i in found]


def input_root(i: int) -> Root:
  """Returns what identifies an input of a whole program."""
  return (i, "input")


def _readers(products: Iterable[ProductRole]) -> dict[Root | None, list[ProductRole]]:
  """Returns products by what identifies their operands."""
  readers: dict[Root | None, list[ProductRole]] = {}
  for product in products:
    for root in filter(None, product.roots):
      readers.setdefault(root, []).append(product)
  return readers


def _row(root: Root | None) -> Root | None:
  """Returns what identifies a step's part of a value that a scan goes through."""
  if root is not None and root[0] is _STACKED:
    return cast(Root | None, root[1])
  return (root, "row")


def is_layer(equation: JaxprEqn, rules: CastingRules, of_matrices: bool = False) -> bool:
  """Returns whether an equation is a convolution or a product, other than of two vectors.

  Args:
    equation: any equation.
    rules: what decides.
    of_matrices: nor of a matrix and a vector, of which power iterations are made.
  """
  if rules.list_of(equation.primitive) != "allow":
    return False
  if equation.primitive is not jax.lax.dot_general_p:
    return True
  contracted, batch = equation.params["dimension_numbers"]
  used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
  free = [len(shape_of(a)) > n for a, n in zip(equation.invars, used, strict=True)]
  return all(free) if of_matrices else any(free)


def states_precision(equation: JaxprEqn) -> bool:
  """Returns whether a product states its precision, or an algorithm, which names its operands' dtypes."""
  precision = equation.params.get("precision")
  if precision is None:
    return False
  if isinstance(precision, tuple):
    ambient = getattr(jax.config, "jax_default_matmul_precision", None)
    return jax.lax.Precision.HIGHEST in precision and str(ambient) not in ("highest", "float32")
  return True
