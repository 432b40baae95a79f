"""Where a program's values come from, and which of its equations multiply matrices.

A forward analysis finds the values after a layer (a product, or a lookup in a table), and the data,
parameters and positions that are in each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.formats._passes import passes_of
from mpjax.jaxpr import (
  Calls,
  Facts,
  Trait,
  backward_depth,
  bodies_of,
  has,
  is_variable,
  open_jaxpr,
  shape_of,
)

Root: TypeAlias = tuple[Hashable, Hashable]  # the identity of a value behind reshapes and calls

_STACKED = "stacked"  # the array that a scan stacks from a value


class Lineage(NamedTuple):
  """The facts about a value that determine the role of a product.

  Attributes:
    active: whether a layer came before it.
    varies: whether it depends on an input or a JAX array that the program closes over, not only on positions,
      literals and NumPy arrays.
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


# Bits of `Lineage.sources`: closed-over arrays of JAX, those of NumPy, positions; then inputs.
_CLOSED_OVER, _NUMPY, _POSITIONS = 1, 2, 4
_CONSTANTS = _NUMPY | _POSITIONS
# What leaves a value that is added as large as it is, or scales it.
_LINEAR = Trait.ADDS | Trait.CHOICE | Trait.SCALES | Trait.PASSES_ON | Trait.MOVES | Trait.MARKS_AXES


class Lineages(ByRules[Lineage]):
  """The sources of values, without those that are known to be `parameters`."""

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
    return Lineage(
      a.active or b.active,
      a.varies or b.varies,
      b.root if a.root is None else a.root,
      a.gradient or b.gradient,
      a.argument and b.argument,
      a.real or b.real,
      a.solved or b.solved,
      a.sources | b.sources,
    )

  def transfer(self, equation: JaxprEqn, operands: list[Lineage], calls: Calls) -> list[Lineage]:
    found = functools.reduce(self.join, operands, Lineage(False, False, None))
    active, sources = found.active, _sources(equation, operands)
    solved = found.solved or has(equation, Trait.ALGEBRA)
    if is_product(equation, self._rules):
      layer = is_layer(equation, self._rules, of_matrices=True) and not is_outer(equation)
      layer = layer and found.varies and not (self._parameters is not None and is_filter(operands))
      active, sources = active or layer, 0 if active or layer else sources
      solved = all(f.solved for f in operands[:2])
    elif equation.primitive is jax.lax.gather_p:
      active = active or operands[1].varies
    elif has(equation, Trait.SAME_WEIGHT) and len(operands) == 1:
      return [operands[0]._replace(argument=False)]
    gradient = found.gradient or backward_depth(equation) > 0
    made = found._replace(active=active, gradient=gradient, solved=solved, sources=sources)
    other = made._replace(real=False, solved=False)
    of_literals = not any(map(is_variable, equation.invars))
    pairs = ((made if is_float(v.aval) else other, v) for v in equation.outvars)
    return [fact._replace(root=None if of_literals else (calls, v)) for fact, v in pairs]

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
  return any(data) and any(f.sources & _NUMPY and not f.varies for f in operands[:2])


class Product(NamedTuple):
  """A product of a whole program.

  Attributes:
    place: the calls around it, and itself.
    operands: the sources of its two operands.
  """

  place: Calls
  operands: tuple[Lineage, Lineage]

  @property
  def equation(self) -> JaxprEqn:
    """The product itself."""
    return self.place[-1][0]

  @property
  def roots(self) -> tuple[Root | None, Root | None]:
    """The identities of its operands."""
    return self.operands[0].root, self.operands[1].root


def products(lineages: Facts[Lineage], rules: CastingRules) -> Iterator[Product]:
  """Yields the products of a program in its order, those of bodies after their call."""
  for equation in lineages.equations:
    if is_product(equation, rules):
      lhs, rhs = (lineages[a] for a in equation.invars[:2])
      yield Product((*lineages.calls, (equation, 0)), (lhs, rhs))
    for i in range(len(bodies_of(equation))):
      inner = lineages.inside(equation, i)
      if inner is not None:
        yield from products(inner, rules)


def sources(jaxpr: AnyJaxpr, rules: CastingRules, arguments: Sequence[int]) -> tuple[Facts[Lineage], int]:
  """Returns the sources of a whole program's values, and which of them are parameters; see `Program.of`."""
  inputs = [
    Lineage(
      False,
      True,
      input_root(i),
      argument=True,
      real=is_float(v.aval),
      sources=_source(i) if shape_of(v) else 0,
    )
    for i, v in enumerate(open_jaxpr(jaxpr).invars)
  ]
  lineages = Lineages(rules).solve(jaxpr, inputs)
  groups: dict[int, int] = {}  # by argument, the bits of its leaves
  for i, argument in enumerate(arguments):
    groups[argument] = groups.get(argument, 0) | _source(i)
  parameters, has_filters = _parameters(products(lineages, rules), list(groups.values()))
  if has_filters:
    inputs = [fact._replace(sources=fact.sources & ~parameters) for fact in inputs]
    lineages = Lineages(rules, parameters).solve(jaxpr, inputs)
  return lineages, parameters


def input_root(i: int) -> Root:
  """Returns the identity of an input of a whole program."""
  return (i, "input")


def _source(i: int) -> int:
  """Returns the bit of an input of a whole program."""
  return _POSITIONS << 1 + i


def _parameters(found_products: Iterable[Product], groups: list[int]) -> tuple[int, bool]:
  """Returns the sources that are parameters, and whether a product may be one of data and a NumPy array.

  What a layer multiplies an activation by is a parameter, and with it the other inputs of its argument,
  unless data is among them. The right operand of a product before any layer is a parameter, and the left one
  is data, unless one of them is known to be the other.

  Args:
    found_products: the products of the program.
    groups: for each argument, the bits of its leaves.
  """
  found = data = 0
  first, has_filters = [], False
  for product in found_products:
    equation, (lhs, rhs) = product.equation, product.operands
    if backward_depth(equation) or lhs.gradient or rhs.gradient or (lhs.active and rhs.active):
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
    if not rhs.varies:  # a filter, or rows of data behind a weight on the left
      found |= left & ~data if rows else 0
    elif apart and not right & (data | left) and not left & found:
      found, data = found | right, data | left & ~right
  return found | sum(
    {leaves & ~found for leaves in groups if leaves & layers and not leaves & data}
  ), has_filters


def is_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  """Returns whether an equation is a layer of two operands: a user may allow operations of one operand."""
  return len(equation.invars) > 1 and is_layer(equation, rules)


def is_layer(equation: JaxprEqn, rules: CastingRules, of_matrices: bool = False) -> bool:
  """Returns whether an equation is a convolution or a product, other than of two vectors.

  `of_matrices`: also not of a matrix and a vector, as in power iterations.
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


def in_backward(equation: JaxprEqn, calls: Calls) -> bool:
  """Returns whether an equation, or a call around it, is in a backward pass."""
  return any(map(backward_depth, (equation, *(call for call, _ in calls))))


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
