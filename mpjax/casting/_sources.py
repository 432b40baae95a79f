"""Where a program's values come from, which of its equations multiply matrices, and which loops are solvers.

A forward analysis finds the values after a layer (a product, or a lookup in a table), and the data,
parameters and positions that are in each. Another, of one loop, finds what the loop makes of its carry.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.casting._reasons import Code
from mpjax.formats import passes_of
from mpjax.jaxpr import (
  FULL_PRECISION,
  CallKind,
  Calls,
  Facts,
  Trait,
  at_region_edge,
  backward_depth,
  bodies_of,
  call_kind,
  call_layout,
  dtype_of,
  equations_in,
  has,
  inside,
  is_variable,
  marked_path,
  open_jaxpr,
  shape_of,
)

Root: TypeAlias = tuple[Hashable, Hashable]  # the identity of a value behind reshapes and calls

_STACKED = "stacked"  # the array that a scan stacks from a value


class Source(NamedTuple):
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
    inputs: a bit for each input, and for each kind of constant. Before a layer, those that it depends on;
      after one, those that linear operations have put into it.
  """

  active: bool
  varies: bool
  root: Root | None
  gradient: bool = False
  argument: bool = False
  real: bool = False
  solved: bool = False
  inputs: int = 0


# Bits of `Source.inputs`: closed-over arrays of JAX, those of NumPy, positions; then inputs.
_CLOSED_OVER, _NUMPY, _POSITIONS = 1, 2, 4
_CONSTANTS = _NUMPY | _POSITIONS
# What leaves a value that is added as large as it is, or scales it.
_LINEAR = Trait.ADDS | Trait.CHOICE | Trait.SCALES | Trait.PASSES_ON | Trait.MOVES | Trait.MARKS_AXES

# Of loops.
_LONG = 32  # steps: a network has about as many layers
_SUMS = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.ADDS
_BILINEAR = Trait.PRODUCT | Trait.SCALES | Trait.ACCUMULATES
_CHOOSES = frozenset({jax.lax.select_n_p, jax.lax.dynamic_update_slice_p})
_ACTIVATIONS = frozenset(
  {jax.lax.tanh_p, jax.lax.logistic_p, jax.lax.erf_p, jax.lax.max_p, jax.lax.min_p, jax.lax.reduce_max_p}
)


class Sources(ByRules[Source]):
  """The sources of values, without those that are known to be `parameters`."""

  def __init__(self, rules: CastingRules, parameters: int | None = None):
    super().__init__(rules)
    self._parameters = parameters

  def start(self, atom: Atom) -> Source:
    if is_variable(atom):
      real = is_float(atom.aval)
      bits = _CLOSED_OVER & ~(self._parameters or 0)
      return Source(False, True, (atom, "constant"), argument=True, real=real, inputs=bits)
    is_array = is_float(atom.aval) and bool(shape_of(atom))
    return Source(False, False, None, argument=is_array, real=is_array)

  def constant(self, variable: Var, value: object) -> Source:
    fact = self.start(variable)
    # A NumPy array cannot be trained; one of JAX may be a parameter.
    return fact if isinstance(value, jax.Array) else fact._replace(varies=False, inputs=_NUMPY)

  def join(self, a: Source, b: Source) -> Source:
    return Source(
      active=a.active or b.active,
      varies=a.varies or b.varies,
      root=b.root if a.root is None else a.root,
      gradient=a.gradient or b.gradient,
      argument=a.argument and b.argument,
      real=a.real or b.real,
      solved=a.solved or b.solved,
      inputs=a.inputs | b.inputs,
    )

  def transfer(self, equation: JaxprEqn, operands: list[Source], calls: Calls) -> list[Source]:
    found = functools.reduce(self.join, operands, Source(False, False, None))
    active, bits = found.active, _bits(equation, operands)
    solved = found.solved or has(equation, Trait.ALGEBRA)
    if is_product(equation, self._rules):
      layer = is_layer(equation, self._rules, of_matrices=True) and not is_outer(equation)
      layer = layer and found.varies and not (self._parameters is not None and is_filter(operands))
      active, bits = active or layer, 0 if active or layer else bits
      solved = all(f.solved for f in operands[:2])
    elif equation.primitive is jax.lax.gather_p:
      active = active or operands[1].varies
    elif has(equation, Trait.SAME_WEIGHT) and len(operands) == 1:
      return [operands[0]._replace(argument=False)]
    gradient = found.gradient or backward_depth(equation) > 0
    made = found._replace(active=active, gradient=gradient, solved=solved, inputs=bits)
    other = made._replace(real=False, solved=False)
    of_literals = not any(map(is_variable, equation.invars))
    pairs = ((made if is_float(v.aval) else other, v) for v in equation.outvars)
    return [fact._replace(root=None if of_literals else (calls, v)) for fact, v in pairs]

  def row(self, fact: Source) -> Source:
    if fact.root is not None and fact.root[0] is _STACKED:
      return fact._replace(root=cast(Root | None, fact.root[1]))
    return fact._replace(root=(fact.root, "row"))

  def stacked(self, fact: Source) -> Source:
    return fact._replace(root=(_STACKED, fact.root), argument=False)

  def after_loop(self, result: Var, fact: Source, calls: Calls) -> Source:
    return fact._replace(root=(calls, result), argument=False)

  def chosen(self, result: Source, choice: Source) -> Source:
    return result._replace(argument=False)


def _bits(equation: JaxprEqn, operands: list[Source]) -> int:
  """Returns `Source.inputs` of an equation's results."""
  if equation.primitive in (jax.lax.gather_p, jax.lax.dynamic_slice_p):
    return operands[0].inputs
  if equation.primitive is jax.lax.iota_p:
    return _POSITIONS
  given = operands[1:] if equation.primitive is jax.lax.select_n_p else operands
  if any(f.active for f in given) and not has(equation, _LINEAR):
    return 0
  return functools.reduce(operator.or_, (f.inputs for f in given), 0)


def is_filter(operands: Sequence[Source]) -> bool:
  """Returns whether a product is one of data and a NumPy array, before any layer: no layer, but a filter.

  Args:
    operands: the sources of its operands; parameters are not among them.
  """
  data = [bool(f.inputs & ~_CONSTANTS) and not f.active for f in operands[:2]]
  return any(data) and any(f.inputs & _NUMPY and not f.varies for f in operands[:2])


class Product(NamedTuple):
  """A product of a whole program.

  Attributes:
    place: the calls around it, and itself.
    operands: the sources of its two operands.
  """

  place: Calls
  operands: tuple[Source, Source]

  @property
  def equation(self) -> JaxprEqn:
    """The product itself."""
    return self.place[-1][0]

  @property
  def roots(self) -> tuple[Root | None, Root | None]:
    """The identities of its operands."""
    return self.operands[0].root, self.operands[1].root


def products(sources: Facts[Source], rules: CastingRules) -> Iterator[Product]:
  """Yields the products of a program in its order, those of bodies after their call."""
  for equation in sources.equations:
    if is_product(equation, rules):
      lhs, rhs = (sources[a] for a in equation.invars[:2])
      yield Product((*sources.calls, (equation, 0)), (lhs, rhs))
    for i in range(len(bodies_of(equation))):
      inner = sources.inside(equation, i)
      if inner is not None:
        yield from products(inner, rules)


def sources_of(jaxpr: AnyJaxpr, rules: CastingRules, arguments: Sequence[int]) -> tuple[Facts[Source], int]:
  """Returns the sources of a whole program's values, and which inputs are parameters; see `Program.of`."""
  inputs = [
    Source(
      False,
      True,
      input_root(i),
      argument=True,
      real=is_float(v.aval),
      inputs=_bit(i) if shape_of(v) else 0,
    )
    for i, v in enumerate(open_jaxpr(jaxpr).invars)
  ]
  sources = Sources(rules).solve(jaxpr, inputs)
  groups: dict[int, int] = {}  # by argument, the bits of its leaves
  for i, argument in enumerate(arguments):
    groups[argument] = groups.get(argument, 0) | _bit(i)
  parameters, has_filters = _parameters(products(sources, rules), list(groups.values()))
  if has_filters:
    inputs = [fact._replace(inputs=fact.inputs & ~parameters) for fact in inputs]
    sources = Sources(rules, parameters).solve(jaxpr, inputs)
  return sources, parameters


def input_root(i: int) -> Root:
  """Returns the identity of an input of a whole program."""
  return (i, "input")


def _bit(i: int) -> int:
  """Returns the bit of an input of a whole program."""
  return _POSITIONS << 1 + i


def _parameters(found_products: Iterable[Product], groups: list[int]) -> tuple[int, bool]:
  """Returns the inputs that are parameters, and whether a product may be one of data and a NumPy array.

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
      found |= (rhs if lhs.active else lhs).inputs
  layers = found = found & ~_CONSTANTS
  for lhs, rhs, _ in first:
    data |= (lhs.inputs if rhs.inputs & found else rhs.inputs if lhs.inputs & found else 0) & ~found
  for lhs, rhs, rows in first:
    left, right = lhs.inputs & ~_CONSTANTS, rhs.inputs & ~_CONSTANTS
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


class LoopFacts(NamedTuple):
  """Facts about a loop, or about a call with a rule of its own: whether it is a solver.

  Attributes:
    solver: why its bodies run in float32 under every policy; `None` for others. A fixed point or an adaptive
      step ends where an error is small, which a rounding error never is. A value that passes through an
      arg-max or another integer, such as the next token, does not count. A filter solves a linear system for
      its state at each step, as exactly as it knows the state. A solver's derivative rule is one.
    layers: for each carry, whether its product with weights of the step's own makes a later one. These are
      those of stacked layers, which a `scan` reads row by row, and those that are taken from an array by the
      number of the step.
    recurrent: the products of a long linear recurrence of a `scan`. The state of the loop reaches them and
      the next step only by linear operations, and the matrix that multiplies it is the same at each step.
      After n steps the state is multiplied by the n-th power of the matrix, with n times the relative error
      of a rounding.
  """

  solver: Code | None = None
  layers: tuple[bool, ...] = ()
  recurrent: frozenset[JaxprEqn] = frozenset()


def loop_facts(call: JaxprEqn, rules: CastingRules) -> LoopFacts:
  """Returns the facts about an equation; there are none about most."""
  if call not in rules.found_in_loops:
    kind, found = call_kind(call), LoopFacts()
    if kind in (CallKind.SCAN, CallKind.WHILE):
      found = _of_loop(call, rules)
    elif kind is not None and kind.is_custom_rule:
      found = LoopFacts(_of_one_solver(call, rules))
    rules.found_in_loops[call] = found
  return rules.found_in_loops[call]


def why_in_solver(calls: Calls, rules: CastingRules, path: str = "") -> Code | None:
  """Returns why equations inside some calls run in float32 under every policy; `None` if they do not.

  An override of the carry of a loop has the last word. `path` is the module path of the outermost.
  """
  for call, _ in calls:
    path = inside(path, marked_path(call))
    why = loop_facts(call, rules).solver
    carries = range(len(call_layout(call).carry)) if why else ()
    if why and "half" not in [rules.overrides.at(inside(path, f"carry_{i}")).loop_carry for i in carries]:
      return why
  return None


def _of_one_solver(equation: JaxprEqn, rules: CastingRules) -> Code | None:
  """Returns why the bodies of a call are in float32, if all their products are in solvers."""
  why = None
  for body in bodies_of(equation):
    for inner in open_jaxpr(body).eqns:
      if _is_half_product(inner, rules):
        return None
      own = loop_facts(inner, rules).solver or _of_one_solver(inner, rules)
      if not own and any(_is_half_product(e, rules) for b in bodies_of(inner) for e in equations_in(b)):
        return None
      why = why or own
  return why


def _of_loop(loop: JaxprEqn, rules: CastingRules) -> LoopFacts:
  layout, is_long = call_layout(loop), loop.params.get("length", 0) >= _LONG
  entering = [_Origin(own=k in (layout.rows or layout.carry)) for k in range(len(loop.invars))]
  for k in layout.carry:
    paths = frozenset([(k, None)] if is_long else [])
    state = _Origin(states=frozenset([k]), depends=True, paths=paths)
    entering[k] = state if is_float(loop.invars[k].aval) else _Origin(own=True)
  analysis = _Origins(rules)
  bodies, _ = analysis.enter(loop, layout, entering)
  leaving: dict[int, _Origin] = {}
  solver: Code | None = None
  for facts, body in zip(bodies, layout.bodies, strict=True):
    if not body.decides:
      leaving = dict(zip(layout.carry, facts.outputs, strict=False))
    elif facts.outputs[0].made:
      solver = Code.SOLVER
  if solver is None and not analysis.has_layers and any(fact.solved for fact in leaving.values()):
    solver = Code.STATE_FILTER
  # What leaves has the states of all earlier steps.
  behind = {k: {k, *fact.states} for k, fact in leaving.items()}
  layers = (any(k in fact.layered and j in behind[k] for j, fact in leaving.items()) for k in layout.carry)
  linear = {k: {k, *(i for i, _ in fact.paths)} for k, fact in leaving.items()}
  products = ((i, k, product) for k, fact in leaving.items() for i, product in fact.paths)
  recurrent = (product for i, k, product in products if product is not None and k in linear[i])
  return LoopFacts(solver, tuple(layers), frozenset(recurrent))


class _Origin(NamedTuple):
  """What a value in a loop is computed from.

  Attributes:
    states: the states, by their operands, without those behind an integer.
    own: whether it also depends on other values that differ from step to step.
    depends: whether it depends on a state in any way.
    layered: the states that a product with weights of the step's own multiplied on the way.
    paths: each state that it is linear in, with each product by a constant on the way.
    made: whether products in half precision make it, or floats that were compared.
    multiplied: whether a product is behind it, with no linear algebra after that.
    solved: whether linear algebra lies between it and a state.
  """

  states: frozenset[int] = frozenset()
  own: bool = False
  depends: bool = False
  layered: frozenset[int] = frozenset()
  paths: frozenset[tuple[int, JaxprEqn | None]] = frozenset()
  made: bool = False
  multiplied: bool = False
  solved: bool = False

  @property
  def is_constant(self) -> bool:
    """Whether it is the same at each step."""
    return not (self.own or self.states)


class _Origins(ByRules[_Origin]):
  """What values in a loop are computed from; `has_layers` if products reach an activation function."""

  nothing = _Origin()

  def __init__(self, rules: CastingRules):
    super().__init__(rules)
    self.has_layers = False

  def join(self, a: _Origin, b: _Origin) -> _Origin:
    return _Origin(*map(operator.or_, a, b))

  def transfer(self, equation: JaxprEqn, operands: list[_Origin], calls: Calls) -> list[_Origin]:
    found = functools.reduce(self.join, operands, self.nothing)
    half, solves = _is_half_product(equation, self._rules), has(equation, Trait.ALGEBRA)
    activates = has(equation, Trait.EXPONENTIAL) or equation.primitive in _ACTIVATIONS
    if activates and not (half or solves):
      self.has_layers |= found.multiplied and any(size(a) > 1 for a in equation.invars)
    behind = bool(found.states or found.multiplied or found.solved)
    result = found._replace(
      layered=found.layered | self._layered(equation, operands),
      paths=self._paths(equation, operands, found),
      made=found.made or half,
      multiplied=not solves and (found.multiplied or half),
      solved=found.solved or (solves and behind),
    )
    other = _Origin(own=not found.is_constant, depends=found.depends)
    return [
      result if is_float(v.aval) else other._replace(made=result.made and not _is_index(equation, v))
      for v in equation.outvars
    ]

  def _layered(self, equation: JaxprEqn, operands: list[_Origin]) -> frozenset[int]:
    """Returns the states that an equation multiplies by weights of the step's own."""
    listed = self._rules.list_of(equation.primitive)
    if listed != "allow" and not at_region_edge(marked_path(equation)) and not has(equation, Trait.KERNEL):
      return frozenset()
    pairs = zip(operands, equation.invars, strict=True)
    floats = [fact for fact, a in pairs if is_float(a.aval) and size(a) > 1]
    weights = any(fact.own and not fact.states for fact in floats)
    return frozenset().union(*(fact.states for fact in floats if weights))

  def _paths(
    self, equation: JaxprEqn, operands: list[_Origin], found: _Origin
  ) -> frozenset[tuple[int, JaxprEqn | None]]:
    """Returns the states that an equation's results are linear in, with the products on the way."""
    if has(equation, _SUMS) or equation.primitive in _CHOOSES:
      return found.paths
    moving = [fact for fact in operands if fact.depends]
    if len(moving) != 1 or not has(equation, _BILINEAR):
      return frozenset()
    divides = equation.primitive in (jax.lax.div_p, jax.lax.rem_p) and operands[1] is moving[0]
    if divides or not all(fact.is_constant for fact in operands if fact is not moving[0]):
      return frozenset()
    half = _is_half_product(equation, self._rules)
    return found.paths.union((state, equation) for state, _ in found.paths if half)


def _is_half_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  layer = is_layer(equation, rules) and not states_precision(equation)
  return layer and not is_outer(equation) and FULL_PRECISION not in marked_path(equation).split("/")


def _is_index(equation: JaxprEqn, result: Atom) -> bool:
  """Returns whether a result is an index, a count, or a number that was rounded to an integer."""
  if not np.issubdtype(dtype_of(result), np.integer):
    return False
  return any(is_float(a.aval) or dtype_of(a) == np.dtype(bool) for a in equation.invars)
