"""The rules of decisions: autocast's treatment of an equation, by the first rule that applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.extend.core import primitives

from mpjax._types import Atom, JaxprEqn
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import Mode, Node
from mpjax.casting._higher_order import EMIT, LOOPS
from mpjax.casting._kinds import (
  FLOAT32,
  Held,
  Kind,
  Wide,
  castable,
  computed_from,
  initial,
  is_float,
  is_half,
  joined,
  of_its_own,
  size,
  small,
  strongest,
)
from mpjax.casting._loops import decide_bodies
from mpjax.casting._program import Reads, in_half_alone, in_order_alone, only_float32
from mpjax.casting._reasons import Code
from mpjax.casting._sources import states_precision
from mpjax.jaxpr import (
  OUTPUT,
  CallKind,
  Calls,
  Trait,
  at_region_edge,
  backward_depth,
  bodies_of,
  call_kind,
  dtype_of,
  facts,
  has,
  has_region,
  in_region,
  inside,
  is_variable,
  marked_path,
  open_jaxpr,
  operation_name,
  shape_of,
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

  def __init__(self, equation: JaxprEqn, body: Body, clips: bool):
    self.equation: JaxprEqn = equation
    self.body: Body = body
    self._clips = clips
    self.path: str = inside(body.path, marked_path(equation))
    self.half: np.dtype | None = body.half_at(self.path)
    self.listed: str = body.rules.list_of(equation.primitive, self.half)
    self.is_cast: bool = equation.primitive is jax.lax.convert_element_type_p
    self.at_edge: bool = at_region_edge(self.path)  # anything but a cast there is a sum of gradients
    self.in_region: bool = in_region(self.path) and (self.is_cast or not self.at_edge)
    self.operands: list[Atom] = [a for a in equation.invars if castable(a.aval)]

  def decided(
    self,
    mode: Mode,
    code: Code | None,
    outs: tuple[Held, ...],
    listed: str = "",
    about: str = "",
    **more: Any,
  ) -> Node:
    """Returns a decision about it. Its list decided without `listed`, and gives the reason without `code`."""
    if not self._clips:
      outs = tuple(held._replace(wide=Wide.NO) for held in outs)
    if code is None:
      row = facts(self.equation)
      by_user = row.list_in(self.half) != self.listed
      code, about = (Code.LISTED_BY_USER, "") if by_user else (Code.LISTED, row.reason_in(self.half))
    return Node(self.equation, self.path, listed or self.listed, mode, self.half, code, outs, about, **more)

  @property
  def place(self) -> Calls:
    """The calls around it, and itself."""
    return (*self.body.calls, (self.equation, 0))

  @property
  def why_float32_result(self) -> Code | None:
    """The reason why it has a float32 result as a product in half precision; or `None`.

    A result that another product follows is an activation: half precision holds what that product reads. If
    it is large, such as the logits of a vocabulary, float32 is not worth its memory: in half precision it is
    kept for the backward pass in half the bytes.
    """
    layers, result = self.body.layers, self.equation.outvars[0]
    reads = self.body.reads(result)
    if layers is None or not self.body.rules.wide_gradients or not only_float32(reads):
      return None
    if backward_depth(self.equation) or layers[result].gradient:
      return None
    if reads & Reads.ALGEBRA:
      return Code.RESULT_FOR_ALGEBRA
    operands = self.equation.invars[:2]
    activations = [a for a in operands if layers[a].active] or operands
    if self.body.end(result) & Reads.PRODUCT or 4 * size(result) > max(map(size, activations)):
      return None
    return Code.SMALL_RESULT

  @property
  def meets_data(self) -> bool:
    """Whether half precision meets float32 data in it, and float32 or an order is made of the result.

    What a norm reads is a residual stream. Data differs from row to row; a running mean, which all rows
    share, is as a bias. The program has to return what float32 makes of the result without a layer.
    """
    layers, result = self.body.layers, self.equation.outvars[0]
    if layers is None or not has(self.equation, Trait.ELEMENTWISE):
      return False
    reads, ends = self.body.reads(result), self.body.end(result)
    returned = reads & Reads.FLOAT32 and ends & (Reads.SCALAR | Reads.ARRAY)
    if reads & Reads.NORM or not (reads & Reads.ORDER or returned):
      return False
    met = {a: self.met(a) for a in self.operands if is_variable(a)}
    if not met or strongest(met.values()) is not Kind.HALF:
      return False
    rows = shape_of(result)[:1]
    rounded = [a for a, held in met.items() if held.kind is Kind.HALF]
    data = (a for a in self.equation.invars if a not in rounded and shape_of(a)[:1] == rows)
    return any(layers[a].sources & ~self.body.program.parameters for a in data)

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
      out = computed_from(held, shrinks)
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


def _keep(case: Case, code: Code | None = None, listed: str = "") -> Node:
  """Returns a decision that leaves an equation in the dtypes of the program."""
  return case.decided(Mode.KEEP, code, case.kept(), listed)


def _full(case: Case, code: Code | None = None, listed: str = "") -> Node:
  """Returns a decision that runs an equation in float32."""
  return case.decided(Mode.FULL, code, case.computed(), listed)


def _of_region(case: Case) -> Node | None:
  """Decides about what is inside a `half_precision` region, and about the casts at its edges."""
  if not case.in_region:
    return None
  if case.at_edge and case.half is not None:
    source, result = case.equation.invars[0], case.equation.outvars[0]
    if castable(source.aval) and dtype_of(result) == case.half:
      fits = case.half != np.float16 or (is_variable(source) and source in case.body.widened)
      outs = case.all_in_half(Kind.FIXED)
      return case.decided(Mode.HALF if fits else Mode.EDGE, Code.ENTERS_REGION, outs, "opaque")
    if castable(result.aval) and dtype_of(source) == case.half:
      return case.decided(Mode.EACH, Code.LEAVES_REGION, case.all_in_half(Kind.HALF), "opaque")
  return _keep(case, Code.REGION, "opaque")


def _of_call(case: Case) -> Node | None:
  """Decides about a call: it is entered, follows its operands as relu does, or runs in float32 as one."""
  if case.listed != "call":
    return None
  equation, body, kind = case.equation, case.body, call_kind(case.equation)
  lists = {body.rules.list_of(primitive, case.half) for primitive in body.rules.inside(equation)}
  multiplies = "allow" in lists or any(has_region(open_jaxpr(b)) for b in bodies_of(equation))
  if not case.operands and not multiplies:
    return _keep(case, Code.NO_PRODUCT)
  denied, is_loop = "deny" in lists, kind in LOOPS
  reads_half = any(case.met(a).kind is Kind.HALF for a in case.operands)
  if kind in EMIT and (multiplies or (reads_half and (is_loop or (kind is CallKind.JIT and not denied)))):
    wanted = [case.half if in_half_alone(body.reads(v)) else None for v in equation.outvars]
    held = [case.met(a) for a in equation.invars]
    call = decide_bodies(body.call(equation, case.path, case.half, held), wanted)
    return case.decided(Mode.ENTER, Code.ENTERED, call.outs, call=call)
  if kind in EMIT and reads_half and case.half is not None and not (is_loop or denied):
    return case.decided(Mode.HALF, Code.HALF, case.all_in_half(Kind.HALF), "infer")
  outs = case.computed()
  if any(body.how(a, case.half).wide is Wide.SATURATES for a in case.operands):
    outs = tuple(h._replace(wide=max(h.wide, Wide.SATURATES)) for h in outs)  # `where` of a mask
  code, listed = (Code.CALL_DENIED, "deny") if denied else (Code.CALL_AS_ONE, "infer")
  return case.decided(Mode.FULL, code, outs, listed, operation_name(equation))


def _of_cast(case: Case) -> Node | None:
  """Decides about a cast of the program."""
  if not case.is_cast:
    return None
  source, result = case.equation.invars[0], case.equation.outvars[0]
  if castable(source.aval) and castable(result.aval):  # for a weak type or a sharding
    return case.decided(Mode.EACH, Code.SAME_DTYPE, (case.body.how(source, case.half),), "infer")
  if not castable(result.aval):
    return case.decided(Mode.CAST, Code.OWN_CAST, (Held(Kind.FIXED, dtype_of(result)),), "infer")
  if OUTPUT in case.path.split("/"):
    code, held = Code.AUTOCAST_ENDS, Held(Kind.ISLAND, FLOAT32)
  elif is_float(source.aval):
    code, held = (
      Code.OWN_WIDENING,
      Held(Kind.PINNED if dtype_of(source).itemsize < 4 else Kind.ISLAND, FLOAT32),
    )
  else:
    # Counts and token numbers have more digits than float16.
    fits = case.half != np.float16 or dtype_of(source).itemsize == 1
    code, held = Code.FROM_INTEGERS, Held(Kind.FLEXIBLE, FLOAT32, Wide.NO if fits else Wide.OVERFLOWS)
  return case.decided(Mode.CAST, code, (held,), "infer")


def _of_other_dtypes(case: Case) -> Node | None:
  """Decides about what the user chose a dtype for, what is opaque, and what has no float32 operand."""
  equation, half, results = case.equation, case.half, case.equation.outvars
  multiplies = case.listed == "allow" and half is not None
  given = values_read(equation)
  # Of a product that returns half precision only the operands' dtypes matter.
  asked = given if multiplies and all(dtype_of(v) == half for v in results) else [*given, *results]
  others = [a for a in equation.invars if not castable(a.aval)]
  # A product of a float32 value and one in half precision by the user's choice is as any other.
  is_mixed = multiplies and len(case.operands) == 1 and all(is_half(a.aval) for a in others)
  if any(of_its_own(a.aval) for a in asked) and not (is_mixed and all(castable(v.aval) for v in results)):
    if multiplies and all(dtype_of(a) == half for a in asked) and not states_precision(equation):
      return _quantised(case, Mode.KEEP, case.kept(), Code.OWN_DTYPE)
    return _keep(case, Code.OWN_DTYPE)
  if case.listed == "opaque":
    return _keep(case)
  return None if case.operands else _keep(case, Code.NO_FLOAT32)


def _of_product(case: Case) -> Node | None:
  """Decides about what is on the list `allow`: a product in half precision, or why it keeps float32."""
  if case.listed != "allow":
    return None
  program, rules = case.body.program, case.body.rules
  exact = program.readers.float32.get(case.place)
  if exact in (Code.SUM_OF_PRODUCTS, Code.OUTER_PRODUCT):
    return _full(case, exact, "deny")
  if case.half is None:
    return _full(case, case.body.solver or Code.MODULE)
  if case.place in program.exact and exact is not Code.STATES_PRECISION:
    exact = Code.OF_EXACT
  if exact is not None:
    return _full(case, exact)
  wide = rules.wide_gradients and "preferred_element_type" in case.equation.params
  of_weight = wide and case.body.leaves_backward(case.equation)
  why = None if of_weight else case.why_float32_result
  outs = case.all_in_half(Kind.HALF)
  if of_weight or why:
    outs = case.all_held(Held(Kind.PINNED if of_weight else Kind.ISLAND, FLOAT32))
  return _quantised(case, Mode.HALF, outs, why)


def _quantised(case: Case, mode: Mode, outs: tuple[Held, ...], code: Code | None) -> Node:
  """Returns the decision about a product in half precision, which may be an FP8 product."""
  recipe = case.body.rules.overrides.recipe_at(case.path)
  if recipe is None:
    return case.decided(mode, code, outs)
  program = case.body.program
  role = program.roles.get(case.place) if case.body.layers is not None else None
  found = _fp8_products.decide(case.equation, case.path, recipe, role, program.sites)
  return case.decided(mode, outs=outs, **found)


def _of_denied(case: Case) -> Node | None:
  """Decides about what is on the list `deny`; what only puts values in order changes none of them."""
  if case.listed != "deny":
    return None
  if has(case.equation, Trait.ORDERS):
    met = [case.body.met(a, None, case.equation) for a in case.operands]
    return case.decided(Mode.FULL, None, case.all_held(computed_from(met)))
  return _full(case, None if case.half is not None else case.body.solver or Code.MODULE)


def _of_follower(case: Case) -> Node | None:
  """Decides about anything else, by the kinds of its operands."""
  equation, body = case.equation, case.body
  if has(equation, Trait.EACH) and len(equation.invars) == len(equation.outvars):
    return case.decided(Mode.EACH, Code.EACH_ALONE, tuple(body.how(a, case.half) for a in equation.invars))
  results = [v for v in equation.outvars if castable(v.aval)]
  if not results:  # a comparison is exact whatever the operands
    return case.decided(Mode.FULL, Code.NOT_FLOATING, case.all_held(Held(Kind.FIXED, FLOAT32)))
  is_sum = body.rules.wide_gradients and equation.primitive is primitives.add_jaxvals_p
  if is_sum and body.leaves_backward(equation):
    return case.decided(Mode.FULL, Code.GRADIENT_SUM, case.all_held(Held(Kind.PINNED, FLOAT32)))
  met = [case.met(a) for a in case.operands]
  if case.meets_data:
    wide = max(h.wide for h in met)
    return case.decided(Mode.FULL, Code.MEETS_DATA, case.all_held(Held(Kind.ISLAND, FLOAT32, wide)))
  if case.half is None:
    met = [h._replace(kind=Kind.ISLAND, dtype=FLOAT32) if h.kind is Kind.HALF else h for h in met]
  out = _followed(case, met, max(map(size, results)))
  if out.kind is Kind.HALF and all(in_order_alone(body.reads(v)) for v in results):
    return case.decided(Mode.FULL, Code.ORDER_ALONE, case.all_held(Held(Kind.ISLAND, FLOAT32)))
  if out.kind is Kind.HALF:
    return case.decided(Mode.HALF, Code.HALF, case.all_held(out))
  kind = strongest([out, *(h for h in met if h.kind is not Kind.HALF)])
  return case.decided(Mode.FULL, Code.WIDE if out.wide else Code[kind.name], case.all_held(out))


def _followed(case: Case, met: Sequence[Held], largest: int) -> Held:
  """Returns how results of a size are held that follow the operands, as they met."""
  equation, lineages, pairs = case.equation, case.body.lineages, list(zip(case.operands, met, strict=True))
  statistics = max((size(a) for a, h in pairs if h.kind is Kind.STATISTIC), default=0)
  kind = strongest(met)
  is_large = kind is Kind.STATISTIC and not (small(met) and largest <= statistics)
  if is_large or (kind is Kind.HALF and any(h.wide for h in met)):
    kind = Kind.ISLAND
  out = joined(met, kind, case.half)
  if kind in (Kind.PINNED, Kind.RUNNING):
    out = out._replace(wide=Wide.NO)
  if kind is Kind.HALF and has(equation, Trait.SCALES) and any(h.kind is Kind.ISLAND for h in met):
    out = Held(Kind.ISLAND, FLOAT32)  # the half value may bring its result back into half precision's range
  masks = [a for a, h in pairs if h.wide is Wide.SATURATES]
  if out.wide and masks:
    # A mask of integers times -1e9 is a mask; a value times 1e9, or plus 1e9, is a value.
    values = any(not h.wide and (lineages is None or lineages[a].real) for a, h in pairs)
    number = all(size(a) == 1 for a in masks) and equation.primitive is not jax.lax.select_n_p
    if has(equation, Trait.SCALES) or number:
      out = out._replace(wide=Wide.OVERFLOWS if values else Wide.SATURATES)
  return out


_RULES = (_of_region, _of_call, _of_cast, _of_other_dtypes, _of_product, _of_denied, _of_follower)


def decision_of(case: Case) -> Node:
  """Returns the decision about an equation, by the first rule that applies to it."""
  return next(decision for rule in _RULES if (decision := rule(case)) is not None)
