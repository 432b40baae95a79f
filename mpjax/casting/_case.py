"""An equation to decide about: the questions of the table of decisions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn
from mpjax.casting._cast_plan import Decision, Mode
from mpjax.casting._higher_order import LOOPS, RULES
from mpjax.casting._kinds import (
  FLOAT32,
  Held,
  Kind,
  Where,
  Wide,
  castable,
  initial,
  is_float,
  is_half,
  meet,
  of_its_own,
  size,
  small,
  strongest,
)
from mpjax.casting._product_roles import states_precision
from mpjax.casting._readers import Reads, in_half_alone, why_float32, why_float32_result
from mpjax.casting._reasons import Code
from mpjax.jaxpr import (
  CallKind,
  Trait,
  at_region_edge,
  call_kind,
  dtype_of,
  facts,
  has,
  in_region,
  inside,
  is_variable,
  marked_path,
  values_read,
)

if TYPE_CHECKING:
  from mpjax.casting._decide import Body


class Case:
  """An equation to decide about: the conditions of the table, and how its results are held.

  Args:
    equation: the equation.
    body: the jaxpr around it, as far as it is decided.
    clips: whether results outside the half dtype's range may be clipped where they are rounded.
  """

  rule = ""  # the row of the table that applies

  def __init__(self, equation: JaxprEqn, body: Body, clips: bool):
    self.equation: JaxprEqn = equation
    self.body: Body = body
    self._clips = clips
    self.path: str = inside(body.place.path, marked_path(equation))
    self.half: np.dtype | None = body.half_at(self.path)
    self.listed: str = body.rules.list_of(equation.primitive, self.half)
    self.is_cast: bool = equation.primitive is jax.lax.convert_element_type_p
    self.at_edge: bool = at_region_edge(self.path)  # anything but a cast there is a sum of gradients
    self.in_region: bool = in_region(self.path) and (self.is_cast or not self.at_edge)
    self.operands: list[Atom] = [a for a in equation.invars if castable(a.aval)]

  def decided(
    self, mode: Mode, code: Code, outs: tuple[Held, ...], listed: str = "", **more: Any
  ) -> Decision:
    """Returns a decision about it; without `listed` its own list decided. For the rest see `Decision`."""
    if not self._clips:
      outs = tuple(held._replace(wide=Wide.NO) for held in outs)
    listed = listed or self.listed
    return Decision(self.equation, self.path, listed, mode, self.half, code, self.rule, outs, **more)

  @functools.cached_property
  def lists(self) -> set[str]:
    """The lists of the primitives in its bodies."""
    return self.body.rules.inside(self.equation, self.half)

  @property
  def has_product(self) -> bool:
    """Whether its bodies hold a matrix product, or a region, which stands for one."""
    return "allow" in self.lists or self.body.rules.has_region(self.equation)

  @property
  def why_whole(self) -> Code:
    """The reason for float32, if its module is in float32."""
    return self.body.place.solver or Code.MODULE

  @property
  def is_whole(self) -> bool:
    """Whether nothing in its bodies runs in half precision, and no caller wants to see them."""
    place, overrides = self.body.place, self.body.rules.overrides
    return self.half is None and not place.enter_all and overrides.uniform_below(self.path)

  @functools.cached_property
  def reads_half(self) -> bool:
    """Whether an operand is held in half precision."""
    return any(self.met(a).kind is Kind.HALF for a in self.operands)

  @property
  def is_entered(self) -> bool:
    """Whether its bodies are decided about, one by one."""
    kind = call_kind(self.equation)
    if kind not in RULES or self.is_whole:
      return False
    plain = kind in LOOPS or (kind is CallKind.JIT and "deny" not in self.lists)
    return self.has_product or (plain and self.reads_half)

  @property
  def follows_as_one(self) -> bool:
    """Whether it is a call with its own rule, such as relu, that follows its operands."""
    kind = call_kind(self.equation)
    known = kind in RULES and kind not in LOOPS and "deny" not in self.lists
    return known and self.half is not None and not self.is_whole and self.reads_half

  @property
  def asked(self) -> list[Atom]:
    """The values whose dtypes matter: for a product that returns half precision, only its operands."""
    given, results = values_read(self.equation), self.equation.outvars
    gives_half = self.half is not None and all(dtype_of(v) == self.half for v in results)
    return given if self.listed == "allow" and gives_half else [*given, *results]

  @property
  def has_own_dtypes(self) -> bool:
    """Whether the user chose one of its dtypes, other than half precision for one operand of a product."""
    return any(of_its_own(a.aval) for a in self.asked) and not self._multiplies_half_input

  @property
  def _multiplies_half_input(self) -> bool:
    """Whether it is a product of a float32 value and one in half precision by the user's choice."""
    if self.listed != "allow" or self.half is None or len(self.operands) != 1:
      return False
    others = [a for a in self.equation.invars if not castable(a.aval)]
    return all(is_half(a.aval) for a in others) and all(castable(v.aval) for v in self.equation.outvars)

  @property
  def is_half_by_hand(self) -> bool:
    """Whether it is a product that the user casts to the compute dtype."""
    half = self.listed == "allow" and self.half is not None and self.has_own_dtypes
    return half and all(dtype_of(a) == self.half for a in self.asked) and not states_precision(self.equation)

  @functools.cached_property
  def why_float32(self) -> Code | None:
    """The reason why it keeps float32 operands as a product, from its operands and readers; or `None`."""
    place = self.body.place
    if (*place.calls, (self.equation, 0)) in place.exact:
      return Code.OF_EXACT
    known, result = place.lineages, self.equation.outvars[0]
    operands = [known[a] for a in self.equation.invars[:2]] if known else []
    followed = place.roles.reaches_product(result) if place.roles else place.followed
    return why_float32(self.equation, operands, followed, self._read_as(), self.body.rules, place.calls)

  @property
  def why_float32_result(self) -> Code | None:
    """The reason why it has a float32 result as a product in half precision; or `None`."""
    roles = self.body.place.roles
    if roles is None or not self.body.rules.wide_gradients:
      return None
    return why_float32_result(self.equation, self._read_as(), roles)

  def _read_as(self) -> Reads:
    reads = self.body.reads(self.equation.outvars[0])
    return reads if self.body.place.lineages else reads | Reads.HALF  # readers outside are unknown

  @property
  def adds_gradients(self) -> bool:
    """Whether it adds gradients of a parameter."""
    return self.body.rules.wide_gradients and self.body.place.gradients.has_sum(self.equation)

  def real(self) -> list[bool]:
    """Returns which float32 operands come from a float input or a parameter."""
    known = self.body.place.lineages
    return [known is None or known[a].real for a in self.operands]

  @property
  def meets_data(self) -> bool:
    """Whether half precision meets float32 data in it, and float32 or an order is made of the result.

    What a norm reads is a residual stream.
    """
    roles, reads = self.body.place.roles, self.body.reads(self.equation.outvars[0])
    if roles is None or reads & Reads.NORM or not reads & (Reads.FLOAT32 | Reads.ORDER):
      return False
    kinds = {a: self.met(a).kind for a in self.operands if is_variable(a)}
    if not kinds or strongest(kinds.values()) is not Kind.HALF:
      return False
    rounded = [a for a, kind in kinds.items() if kind is Kind.HALF]
    return roles.meets_data(self.equation, rounded, bool(reads & Reads.ORDER))

  def wanted(self) -> list[np.dtype | None]:
    """Returns the half dtype of each result that nothing reads in another dtype."""
    return [self.half if in_half_alone(self.body.reads(v)) else None for v in self.equation.outvars]

  def met(self, atom: Atom) -> Held:
    """Returns how a value is held when it meets the others."""
    return self.body.met(atom, self.half, self.equation)

  def all_held(self, held: Held) -> tuple[Held, ...]:
    """Returns how the results are held if all float32 ones are held like `held`."""
    return tuple(held if castable(v.aval) else initial(v.aval) for v in self.equation.outvars)

  def all_in_half(self, kind: Kind) -> tuple[Held, ...]:
    """Returns how the results are held if all float32 ones are in the compute dtype."""
    return self.all_held(Held(kind, cast(np.dtype, self.half)))

  def kept(self) -> tuple[Held, ...]:
    """Returns how the results are held if the equation keeps its dtypes."""
    kind = Kind.ISLAND if self.operands else Kind.FLEXIBLE
    if any(is_float(a.aval) and dtype_of(a).itemsize < 4 for a in self.equation.invars):
      kind = Kind.PINNED
    return self.all_held(Held(kind, FLOAT32))

  def computed(self) -> tuple[Held, ...]:
    """Returns how the results are held if the equation runs in float32 for all operands."""
    held = [self.body.met(a, None, self.equation) for a in self.operands] or [Held(Kind.FLEXIBLE, FLOAT32)]
    largest = max(map(size, self.operands), default=0)
    wide = Wide.OVERFLOWS if self.half == np.float16 and self._expands() else Wide.NO
    outs = []
    for v in self.equation.outvars:
      shrinks = size(v) < largest or small(held)
      out = meet(held, Where.FULL, shrinks)
      outs.append(out._replace(wide=wide) if castable(v.aval) else initial(v.aval))
    return tuple(outs)

  def _expands(self) -> bool:
    """Returns whether a result may be far larger than the operands, and so outside float16's range."""
    if self.equation.primitive not in (jax.lax.div_p, jax.lax.rsqrt_p):
      return has(self.equation, Trait.EXPANDS)
    divisor = self.equation.invars[-1]
    if is_variable(divisor):  # a softmax divides by its sum, a norm by its deviation
      return self.body.how(divisor).kind is not Kind.STATISTIC
    return bool(abs(divisor.val) < 1)

  def reason(self) -> tuple[Code, str]:
    """Returns the reason of the equation's list, and what it tells."""
    row = facts(self.equation)
    if row.list_in(self.half) != self.listed:
      return Code.LISTED_BY_USER, ""
    return Code.LISTED, row.reason_in(self.half)
