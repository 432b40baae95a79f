"""Roles of a program's matrix products: the first, the last, with a weight, with two activations.

A forward analysis finds the values after a layer (a product, or a lookup in a table), and a backward one the
values before a product or before the program's outputs.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.formats._passes import passes_of
from mpjax.jaxpr import (
  Backward,
  Calls,
  Facts,
  Trait,
  backward_depth,
  bodies_of,
  has,
  is_variable,
  open_jaxpr,
  shape_of,
  times_run,
)

F = TypeVar("F")
Root: TypeAlias = tuple[Hashable, Hashable]  # the identity of a value behind reshapes and calls

_STACKED = "stacked"  # the array that a scan stacks from a value


class Lineage(NamedTuple):
  """The facts about a value that determine the role of a product.

  Attributes:
    active: whether a layer came before it.
    varies: whether it depends on an input or a JAX array that the program closes over.
    root: its identity behind reshapes and calls; `None` for a value from literals.
    gradient: whether it was computed in a backward pass, from the cotangents there.
    argument: whether it is an argument of the whole program or an array that it closes over, or a row of one.
    real: whether it depends on a float input or an array that the program closes over, not only on
      positions, indices and constants.
    solved: whether it comes from linear algebra, without layers in between.
    sources: a bit for each input, and for each kind of constant. Before a layer, those that it depends on;
      after one, those that linear operations have put into it.
  """

  active: bool
  varies: bool
  root: Root | None
  gradient: bool = False
  argument: bool = False
  real: bool = False
  solved: bool = False
  sources: int = 0

  @property
  def is_constant(self) -> bool:
    """Whether it is computed from positions, literals and NumPy arrays that the program closes over."""
    return not self.varies


# Bits of `Lineage.sources`: closed-over arrays of JAX, those of NumPy, positions; then inputs.
_CLOSED_OVER, _NUMPY, _POSITIONS = 1, 2, 4
_CONSTANTS = _NUMPY | _POSITIONS
# What leaves a value that is added as large as it is, or scales it.
_LINEAR = Trait.ADDS | Trait.CHOICE | Trait.SCALES | Trait.PASSES_ON | Trait.MOVES | Trait.MARKS_AXES


class Lineages(ByRules[Lineage]):
  """The sources of values.

  Args:
    rules: the rules.
    parameters: the sources that are parameters, which are left out; `None` if they are not known.
  """

  def __init__(self, rules: CastingRules, parameters: int | None = None):
    super().__init__(rules)
    self._parameters = parameters

  def start(self, atom: Atom) -> Lineage:
    if is_variable(atom):
      real = is_float(atom.aval)
      sources = _CLOSED_OVER & ~(self._parameters or 0)
      return Lineage(False, True, (atom, "constant"), argument=True, real=real, sources=sources)
    is_array = is_float(atom.aval) and bool(shape_of(atom))
    return Lineage(False, False, None, argument=is_array, real=is_array)

  def constant(self, variable: Var, value: object) -> Lineage:
    fact = self.start(variable)
    # A NumPy array cannot be trained; one of JAX may be a parameter.
    return fact if isinstance(value, jax.Array) else fact._replace(varies=False, sources=_NUMPY)

  def join(self, a: Lineage, b: Lineage) -> Lineage:
    root = b.root if a.root is None else a.root
    gradient, argument = a.gradient or b.gradient, a.argument and b.argument
    real = a.real or b.real
    active, varies, solved = a.active or b.active, a.varies or b.varies, a.solved or b.solved
    return Lineage(active, varies, root, gradient, argument, real, solved, a.sources | b.sources)

  def transfer(self, equation: JaxprEqn, operands: list[Lineage], calls: Calls) -> list[Lineage]:
    active, varies = any(f.active for f in operands), any(f.varies for f in operands)
    gradient = any(f.gradient for f in operands) or backward_depth(equation) > 0
    real = any(f.real for f in operands)
    solved = any(f.solved for f in operands) or has(equation, Trait.ALGEBRA)
    sources = _sources(equation, operands)
    if is_product(equation, self._rules):
      layer = is_layer(equation, self._rules, of_matrices=True) and not is_outer(equation)
      layer = layer and varies and not (self._parameters is not None and is_filter(operands))
      active, sources = active or layer, 0 if active or layer else sources
      solved = all(f.solved for f in operands[:2])
    elif equation.primitive is jax.lax.gather_p:
      active = active or operands[1].varies
    elif has(equation, Trait.SAME_WEIGHT) and len(operands) == 1:
      return [operands[0]._replace(argument=False)]
    made_of_literals = not any(map(is_variable, equation.invars))
    roots = [None if made_of_literals else (calls, v) for v in equation.outvars]
    made = Lineage(active, varies, None, gradient, real=real, solved=solved, sources=sources)
    other = made._replace(real=False, solved=False)
    pairs = zip(roots, equation.outvars, strict=True)
    return [(made if is_float(v.aval) else other)._replace(root=root) for root, v in pairs]

  def row(self, fact: Lineage) -> Lineage:
    if fact.root is not None and fact.root[0] is _STACKED:
      return fact._replace(root=cast(Root | None, fact.root[1]))
    return fact._replace(root=(fact.root, "row"))

  def stacked(self, fact: Lineage) -> Lineage:
    return fact._replace(root=(_STACKED, fact.root), argument=False)

  def after_loop(self, result: Var, fact: Lineage, calls: Calls) -> Lineage:
    return fact._replace(root=(calls, result), argument=False)

  def chosen(self, result: Lineage, choice: Lineage) -> Lineage:
    return result._replace(argument=False)


def _sources(equation: JaxprEqn, operands: list[Lineage]) -> int:
  """Returns the sources of an equation's results."""
  if equation.primitive in (jax.lax.gather_p, jax.lax.dynamic_slice_p):
    return operands[0].sources
  if equation.primitive is jax.lax.iota_p:
    return _POSITIONS
  given = operands[1:] if equation.primitive is jax.lax.select_n_p else operands
  if any(f.active for f in given) and not has(equation, _LINEAR):
    return 0
  return functools.reduce(operator.or_, (f.sources for f in given), 0)


def is_filter(operands: Sequence[Lineage]) -> bool:
  """Returns whether a product is one of data and a NumPy array, before any layer: no layer, but a filter.

  Args:
    operands: the sources of its operands; parameters are not among them.
  """
  data = [bool(f.sources & ~_CONSTANTS) and not f.active for f in operands[:2]]
  return any(data) and any(f.is_constant and f.sources & _NUMPY for f in operands[:2])


class Ends(enum.Flag):
  """What follows a value. Nothing is assumed to follow a scalar output; after an array it is unknown."""

  NONE = 0
  PRODUCT = enum.auto()
  SCALAR = enum.auto()  # a scalar that the program returns
  ARRAY = enum.auto()


class EndsOfValues(Backward[Ends]):
  """What follows values: up to the next product, and not in a backward pass."""

  nothing = Ends.NONE

  def __init__(self, rules: CastingRules):
    self._rules = rules

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not backward_depth(equation)

  def transfer(self, equation: JaxprEqn, results: list[Ends], calls: Calls) -> list[Ends]:
    found = Ends.NONE
    if not backward_depth(equation):
      # A value that becomes an integer (argmax) is not carried on.
      carried = [end for end, v in zip(results, equation.outvars, strict=True) if is_float(v.aval)]
      found = functools.reduce(operator.or_, carried, Ends.NONE)
      if is_product(equation, self._rules) and is_layer(equation, self._rules, of_matrices=True):
        found = Ends.PRODUCT
    return [found] * len(equation.invars)

  def choice(self, equation: JaxprEqn, results: list[Ends], calls: Calls) -> Ends:
    return functools.reduce(operator.or_, results, Ends.NONE)


class ProductRole(NamedTuple):
  """The role of a matrix product in its program.

  Attributes:
    active: which of its operands come after a layer.
    gradients: which of its operands are gradients, in a backward pass inside the program.
    roots: the identities of its operands.
    size: elements of its result; in a backward pass, elements of the gradient operand.
    last: whether no product follows it.
    weights: which of its operands are weights.
    after: the share of the program's products with a weight that come after it; a loop counts as often as it
      runs, and all of a loop's products have the share of its first run.
  """

  active: tuple[bool, bool]
  gradients: tuple[bool, bool]
  roots: tuple[Root | None, Root | None]
  size: int
  last: bool = False
  weights: tuple[bool, bool] = (False, False)
  after: float = 1.0

  @property
  def first(self) -> bool:
    """Whether no layer came before it."""
    return not any(self.active)


class ProductRoles:
  """Facts about the values and products of a program, or of a body as it is called there.

  A backward product has the role of the forward product that it differentiates.
  """

  def __init__(
    self,
    lineages: Facts[Lineage],
    ends: Facts[Ends] | None,
    products: Mapping[Calls, ProductRole],
    parameters: int,
  ):
    self.lineages = lineages
    self.ends = ends
    self.parameters = parameters
    self._products = products

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, arguments: Sequence[int]) -> ProductRoles:
    """Returns the roles of the products of a whole program.

    Args:
      jaxpr: the program.
      rules: the rules.
      arguments: for each of its inputs, the number of the argument that it is a leaf of.
    """
    body = open_jaxpr(jaxpr)
    inputs = [
      Lineage(
        False,
        True,
        input_root(i),
        argument=True,
        real=is_float(v.aval),
        sources=_source(i) if shape_of(v) else 0,
      )
      for i, v in enumerate(body.invars)
    ]
    lineages = Lineages(rules).solve(jaxpr, inputs)
    groups: dict[int, int] = {}  # by argument, the bits of its leaves
    for i, argument in enumerate(arguments):
      groups[argument] = groups.get(argument, 0) | _source(i)
    parameters, has_filters = _parameters(lineages, rules, list(groups.values()))
    if has_filters:
      inputs = [fact._replace(sources=fact.sources & ~parameters) for fact in inputs]
      lineages = Lineages(rules, parameters).solve(jaxpr, inputs)
    returned = [
      (Ends.ARRAY if shape_of(v) else Ends.SCALAR) if is_float(v.aval) else Ends.NONE for v in body.outvars
    ]
    ends = EndsOfValues(rules).solve(jaxpr, returned)
    return cls(lineages, ends, _products(lineages, ends, rules), parameters)

  def inside(self, equation: JaxprEqn, i: int) -> ProductRoles | None:
    """Returns the roles in the i-th body of a call; `None` if unknown."""
    lineages = self.lineages.inside(equation, i)
    ends = self.ends.inside(equation, i) if self.ends else None
    return ProductRoles(lineages, ends, self._products, self.parameters) if lineages else None

  def product(self, equation: JaxprEqn) -> ProductRole | None:
    """Returns the role of a product; `None` if unknown."""
    return self._products.get((*self.lineages.calls, (equation, 0)))

  def meets_data(self, equation: JaxprEqn, rounded: Sequence[Atom], orders: bool) -> bool:
    """Returns whether values meet data in an elementwise equation, and more than layers read its result.

    Data differs from row to row; a running mean, which all rows share, is as a bias.

    Args:
      equation: any equation.
      rounded: its operands that are in half precision.
      orders: whether an order or an integer is made of the result; otherwise the program has to return what
        is made of it without a layer.
    """
    ends = self._end(equation.outvars[0]) & (Ends.SCALAR | Ends.ARRAY)
    if not has(equation, Trait.ELEMENTWISE) or not (ends or orders):
      return False
    rows = shape_of(equation.outvars[0])[:1]
    data = (a for a in equation.invars if a not in rounded and shape_of(a)[:1] == rows)
    return any(self.lineages[a].sources & ~self.parameters for a in data)

  def reaches_product(self, atom: Atom) -> bool:
    """Returns whether a product follows a value."""
    return bool(self._end(atom) & Ends.PRODUCT)

  def is_followed(self, atom: Atom) -> bool:
    """Returns whether a product follows a value, or may: after an array that the program returns."""
    return bool(self._end(atom) & (Ends.PRODUCT | Ends.ARRAY))

  def _end(self, atom: Atom) -> Ends:
    return self.ends[atom] if self.ends else Ends.NONE


def by_calls(facts: Facts[F]) -> dict[Calls, Facts[F]]:
  """Returns the facts about a program and its bodies, by the calls around each."""
  return {own.calls: own for own in facts.everywhere()}


def _source(i: int) -> int:
  """Returns the bit of an input of a whole program."""
  return _POSITIONS << 1 + i


def _parameters(lineages: Facts[Lineage], rules: CastingRules, groups: list[int]) -> tuple[int, bool]:
  """Returns the sources that are parameters, and whether a product may be one of data and a NumPy array.

  What a layer multiplies an activation by is a parameter, and with it the other inputs of its argument,
  unless data is among them. The right operand of a product before any layer is a parameter, and the left one
  is data, unless one of them is known to be the other.

  Args:
    lineages: the sources of the program's values.
    rules: the rules.
    groups: for each argument, the bits of its leaves.
  """
  found = data = 0
  first, has_filters = [], False
  for facts in lineages.everywhere():
    for equation in facts.equations:
      if not is_product(equation, rules) or backward_depth(equation):
        continue
      lhs, rhs = (facts[a] for a in equation.invars[:2])
      if lhs.gradient or rhs.gradient or (lhs.active and rhs.active):
        continue
      has_filters = has_filters or is_filter((lhs, rhs))
      dims = equation.params["dimension_numbers"] if equation.primitive is jax.lax.dot_general_p else None
      if not (lhs.active or rhs.active):
        rows = dims is not None and dims[0][1] == (len(shape_of(equation.invars[1])) - 1,) != (0,)
        first.append((lhs, rhs, rows))
      elif dims is None or not dims[1][0]:
        found |= (rhs if lhs.active else lhs).sources
  layers = found = found & ~_CONSTANTS
  for lhs, rhs, _ in first:
    data |= (lhs.sources if rhs.sources & found else rhs.sources if lhs.sources & found else 0) & ~found
  for lhs, rhs, rows in first:
    left, right = lhs.sources & ~_CONSTANTS, rhs.sources & ~_CONSTANTS
    apart = len(groups) < 2 or not any(left & leaves and right & leaves for leaves in groups)
    if rhs.is_constant:  # a filter, or rows of data behind a weight on the left
      found |= left & ~data if rows else 0
    elif apart and not right & (data | left) and not left & found:
      found, data = found | right, data | left & ~right
  return found | sum(
    {leaves & ~found for leaves in groups if leaves & layers and not leaves & data}
  ), has_filters


def _products(lineages: Facts[Lineage], ends: Facts[Ends], rules: CastingRules) -> dict[Calls, ProductRole]:
  """Returns the products of a program by equation, with the calls around it."""
  known = {}
  after = by_calls(ends)
  for facts, equation in _in_order(lineages):
    if is_product(equation, rules):
      behind = after.get(facts.calls)
      outs = [behind[v] for v in equation.outvars if is_float(v.aval)] if behind else [Ends.PRODUCT]
      last = not any(end & Ends.PRODUCT for end in outs)
      lhs, rhs = (facts[a] for a in equation.invars[:2])
      gradient = lhs.gradient or rhs.gradient or backward_depth(equation) > 0
      still = [not x.active and not x.gradient for x in (lhs, rhs)]
      known[(*facts.calls, (equation, 0))] = ProductRole(
        (lhs.active, rhs.active),
        (lhs.gradient, rhs.gradient),
        (lhs.root, rhs.root),
        size(equation.invars[0 if lhs.gradient else 1] if gradient else equation.outvars[0]),
        last,
        (still[0] and not still[1], still[1]),
      )
  again = {place for place in known if any(backward_depth(call) for call, _ in place[:-1])}
  backward = {place for place, role in known.items() if any(role.gradients)}
  forward = {place: role for place, role in known.items() if place not in backward | again}
  forward |= _with_shares(forward)
  recomputed = _inherited({place: known[place] for place in again - backward}, forward)
  both = forward | recomputed
  return both | _inherited({place: known[place] for place in backward}, both)


def _in_order(facts: Facts[F]) -> Iterator[tuple[Facts[F], JaxprEqn]]:
  """Yields the equations of a program in its order, those of bodies after their call."""
  for equation in facts.equations:
    yield facts, equation
    for i in range(len(bodies_of(equation))):
      inner = facts.inside(equation, i)
      if inner is not None:
        yield from _in_order(inner)


def _inherited(
  products: Mapping[Calls, ProductRole], forward: Mapping[Calls, ProductRole]
) -> dict[Calls, ProductRole]:
  """Returns products of a backward pass with the roles of the forward products that they differentiate.

  Args:
    products: products of gradients, or recomputed ones; those without a forward product are left out.
    forward: the other products.
  """
  readers: dict[Root | None, list[ProductRole]] = {}
  for role in forward.values():
    for root in filter(None, role.roots):
      readers.setdefault(root, []).append(role)
  found = {}
  for place, role in products.items():
    roots = [root for root, gradient in zip(role.roots, role.gradients, strict=True) if not gradient]
    sources = [p for root in roots for p in readers.get(root, [])]
    sources = [p for p in sources if p.size == role.size] or sources
    if not sources or all(role.gradients):
      continue
    active = role.active  # of a recomputed product
    if any(role.gradients):
      active = (all(p.active[0] for p in sources), all(p.active[1] for p in sources))
    last, after = any(p.last for p in sources), min(p.after for p in sources)
    found[place] = role._replace(active=active, last=last, after=after)
  return found


def _with_shares(products: Mapping[Calls, ProductRole]) -> dict[Calls, ProductRole]:
  """Returns products with a weight, with the share of them that comes after each.

  Args:
    products: products of the forward pass, in the order of the program.
  """

  def outermost_loop(place: Calls) -> Calls:
    """Returns the outermost loop around a product; the product itself without one."""
    return next((place[: i + 1] for i, (e, _) in enumerate(place) if times_run(e) > 1), place)

  weighted = (place for place, role in products.items() if not all(role.active))
  counts = {place: math.prod(times_run(equation) for equation, _ in place) for place in weighted}
  found: dict[Calls, ProductRole] = {}
  after = 0
  for _, together in itertools.groupby(reversed(counts), outermost_loop):
    places = list(together)
    after += sum(counts[place] for place in places)
    share = (after - 1) / sum(counts.values())
    found |= {place: products[place]._replace(after=share) for place in places}
  return found


def input_root(i: int) -> Root:
  """Returns the identity of an input of a whole program."""
  return (i, "input")


def is_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  """Returns whether an equation is a layer of two operands: a user may allow operations of one operand."""
  return len(equation.invars) > 1 and is_layer(equation, rules)


def is_layer(equation: JaxprEqn, rules: CastingRules, of_matrices: bool = False) -> bool:
  """Returns whether an equation is a convolution or a product, other than of two vectors.

  Args:
    equation: any equation.
    rules: the rules.
    of_matrices: also not of a matrix and a vector, as in power iterations.
  """
  if rules.list_of(equation.primitive) != "allow":
    return False
  if equation.primitive is not jax.lax.dot_general_p:
    return True
  contracted, batch = equation.params["dimension_numbers"]
  used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
  free = [len(shape_of(a)) > n for a, n in zip(equation.invars, used, strict=True)]
  return all(free) if of_matrices else any(free)


def is_outer(equation: JaxprEqn) -> bool:
  """Returns whether a product only multiplies: a column times a row, and any that contracts one element."""
  if equation.primitive is jax.lax.conv_general_dilated_p:
    out = equation.params["dimension_numbers"].rhs_spec[0]
    return all(n == 1 for axis, n in enumerate(shape_of(equation.invars[1])) if axis != out)
  if equation.primitive is not jax.lax.dot_general_p:
    return False
  contracted, _ = equation.params["dimension_numbers"]
  shapes = [shape_of(a) for a in equation.invars]
  if any(shape[i] != 1 for own, shape in zip(contracted, shapes, strict=True) for i in own):
    return False
  return bool(contracted[0]) or all(size(a) < size(equation.outvars[0]) for a in equation.invars)


def states_precision(equation: JaxprEqn) -> bool:
  """Returns whether a product states its precision, or an algorithm, which names its operands' dtypes.

  The passes of a policy (`matmul_precision`) are for the products that stay in float32.
  """
  precision = equation.params.get("precision")
  if precision is None:
    return False
  ambient = str(getattr(jax.config, "jax_default_matmul_precision", None))
  if isinstance(precision, tuple):
    return jax.lax.Precision.HIGHEST in precision and ambient not in ("highest", "float32")
  return passes_of(precision) is None or ambient != precision.name
