"""A jaxpr during the decisions: its place in the program, and what is decided and known about its values."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from mpjax._types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Var
from mpjax.casting._cast_plan import Bodies
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._fp8_products import Sites
from mpjax.casting._kinds import FLOAT32, Held, Kind, initial
from mpjax.casting._product_roles import Lineage, ProductRoles
from mpjax.casting._readers import Readers, Reads, WeightGradients, in_half_alone
from mpjax.casting._reasons import Code
from mpjax.jaxpr import Calls, Facts, backward_depth, is_variable, open_jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
  """Facts about a jaxpr from its place in the program.

  Attributes:
    gradients: the gradients of parameters in it.
    roles: the roles of its products; `None` if unknown, as in a derivative rule.
    lineages: the sources of its values; `None` if unknown, as in a backward rule.
    readers: the readers of its values; `None` if those outside are unknown.
    exact: see `backward_of_exact`.
    calls: the calls around it, outermost first.
    path: its module path.
    sites: the names of products under delayed FP8 scaling so far.
    islands: whether to make islands: not inside a checkpoint of the user's.
    in_loop: whether it is a step of a `scan`, whose backward pass is another loop.
    solver: why it is in float32 under every policy, such as the body of a solver; otherwise `None`.
  """

  gradients: WeightGradients
  roles: ProductRoles | None = None
  lineages: Facts[Lineage] | None = None
  readers: Facts[Reads] | None = None
  exact: frozenset[Calls] = frozenset()
  calls: Calls = ()
  path: str = ""
  sites: Sites = dataclasses.field(default_factory=Sites)
  islands: bool = True
  in_loop: bool = False
  solver: Code | None = None


class Body(abc.ABC):
  """One jaxpr during the decisions.

  Args:
    jaxpr: the program.
    held: how its constants and inputs are held.
    rules: the rules.
    place: its place, if it is a body.
    tangents: how many of its last inputs are tangents, in which it must stay linear.

  Attributes:
    held: how each variable is held, as far as it is decided.
    widened: variables that the user's program widens from float16.
  """

  def __init__(
    self, jaxpr: AnyJaxpr, held: Sequence[Held], rules: CastingRules, place: Place, tangents: int = 0
  ):
    self.rules: CastingRules = rules
    self.place: Place = place
    self._jaxpr: Jaxpr = open_jaxpr(jaxpr)
    self._inputs = (*self._jaxpr.constvars, *self._jaxpr.invars)
    self.held: dict[Var, Held] = dict(zip(self._inputs, held, strict=True))
    self.widened: set[Var] = set()
    unknown = [Reads.NONE] * len(self._jaxpr.outvars)
    self._readers = place.readers or Readers(rules, place.path).solve(jaxpr, unknown)
    self._depth: dict[Var, int] = {}
    self._linear = set(self._inputs[len(self._inputs) - tangents :])

  def how(self, atom: Atom, half: np.dtype | None = None) -> Held:
    """Returns how a variable or literal is held."""
    return self.held[atom] if is_variable(atom) else initial(atom.aval, atom.val, half)

  def half_at(self, path: str) -> np.dtype | None:
    """Returns the half dtype that a module computes in there; `None` for float32."""
    overrides = self.rules.overrides
    return None if self.place.solver and not overrides.is_set(path) else overrides.half_at(path)

  def reads(self, atom: Atom) -> Reads:
    """Returns the readers of this variable."""
    return self._readers[atom]

  def met(self, atom: Atom, half: np.dtype | None, equation: JaxprEqn) -> Held:
    """Returns how a variable is held when it meets others in an equation.

    An island's result that is only read in half precision is half from here on. A gradient that leaves the
    backward pass is float32, as with parameters cast by hand: otherwise an optimiser's sums would stall.
    """
    held = self.how(atom, half)
    depth = self._depth.get(atom, 0) if is_variable(atom) else 0
    if held.kind in (Kind.HALF, Kind.ISLAND) and depth > backward_depth(equation):
      return Held(Kind.PINNED, FLOAT32)
    if held.kind is Kind.ISLAND and half is not None and not held.wide and in_half_alone(self.reads(atom)):
      return Held(Kind.HALF, half)
    return held

  @abc.abstractmethod
  def bodies(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Bodies:
    """Returns the object that decides about the bodies of a call in a module that computes in `half`."""
