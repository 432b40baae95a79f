"""Facts about primitives: autocast's decision, what one does with its operands, which call it is.

`_primitive_table.py` holds the facts, one row a primitive. Everything else asks here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from mpjax._compat import defined_by_jax

LISTS = ("allow", "deny", "infer", "opaque", "call")


class Trait(enum.Flag):
  """Traits of a primitive: what it does with its operands."""

  NONE = 0

  # Of values that come out as they went in.
  ALIAS = enum.auto()  # each result is an operand's bytes, under another type, shape or order
  SAME_WEIGHT = enum.auto()  # the result is all of its operand: a transposed weight is still that weight
  PASSES_ON = enum.auto()  # the result is made of its operands' elements, which reach a product as they are
  CAST = enum.auto()  # the operand's elements, rounded
  MOVES = enum.auto()  # results lie elsewhere in memory, so that a cast before it is not free
  EACH = enum.auto()  # each operand has a result of its own
  MARKS_AXES = enum.auto()  # says over which axes of a mesh a value varies: a matter of types alone

  # Of arithmetic.
  ELEMENTWISE = enum.auto()  # an element of the result depends on the operands' elements in its place
  BROADCASTS = enum.auto()  # it broadcasts operands of a lesser shape itself
  EXPONENTIAL = enum.auto()  # turns an absolute error into a relative one, or the other way round
  EXPANDS = enum.auto()  # its results may be far larger than its operands
  SCALES = enum.auto()  # a value decays or grows on its way through it
  ADDS = enum.auto()  # adds its operands, or the parts of devices: gradients go through it as they are
  ACCUMULATES = enum.auto()  # sums elements, or products of them: linear in each operand
  PRODUCT = enum.auto()  # a matrix product or convolution
  KERNEL = enum.auto()  # a program of another language, made for the dtypes that it is traced with
  ALGEBRA = enum.auto()  # solves or factorises: a rounding error of a matrix may take its inverse away
  ORDERS = enum.auto()  # puts values in order: equal ones keep the order that they come in

  # Of what the backward pass keeps.
  CHOICE = enum.auto()  # a sum or a choice: its gradient needs no operand, so that its result is what to save
  NO_RESIDUAL = enum.auto()  # its gradient needs neither operand nor result: nothing is saved for it

  # Of what a compiler stores.
  COSTLY = enum.auto()  # dear enough that it is stored for several readers, rather than computed by each
  READS_STORED = enum.auto()  # reads its operands from memory, and writes its results to it
  STORES_RESULT = enum.auto()  # fuses with what makes its operands, and writes its result to memory
  IN_PLACE = enum.auto()  # may write its result over an operand


class CallKind(enum.Enum):
  """The kinds of higher-order primitives whose bodies mpjax looks into."""

  JIT = "jit"
  INLINE = "inline"  # nothing but its body
  REMAT = "remat"
  SCAN = "scan"
  WHILE = "while"
  COND = "cond"
  SHARD_MAP = "shard_map"
  CUSTOM_JVP = "custom_jvp"
  CUSTOM_VJP = "custom_vjp"
  CUSTOM_VMAP = "custom_vmap"
  UNIT = "unit"  # a body that a backend places or replaces as one: its operations may be looked at alone

  @property
  def is_control_flow(self) -> bool:
    """True for a loop or a conditional: its bodies run any number of times."""
    return self in (CallKind.SCAN, CallKind.WHILE, CallKind.COND)

  @property
  def is_custom_rule(self) -> bool:
    """True for a body with a derivative or batching rule of its own: the body is not the whole truth."""
    return self in (CallKind.CUSTOM_JVP, CallKind.CUSTOM_VJP, CallKind.CUSTOM_VMAP)

  @property
  def runs_once(self) -> bool:
    """True if its one body runs once, on the operands as they are."""
    return self in (CallKind.JIT, CallKind.INLINE, CallKind.REMAT) or self.is_custom_rule

  @property
  def is_plain(self) -> bool:
    """True if its bodies are all there is to it, and may be emitted again one by one."""
    return not self.is_custom_rule and self is not CallKind.UNIT


@dataclasses.dataclass(frozen=True)
class PrimitiveFacts:
  """A primitive's row in the table.

  Attributes:
    list: what autocast does with it: `allow` (runs in the compute dtype), `deny` (runs in float32), `infer`
      (follows its operands), `opaque` (keeps the dtypes of the user's program) or `call` (a higher-order
      primitive, whose body is entered).
    reason: why it is on that list.
    float16: `deny` for one of `infer` that is denied in float16, which has not float32's range; else empty.
    reason_in_float16: what float16's range adds to the reason; else empty.
    collective: what it is between devices, by XLA's name (`all-reduce`); empty for what crosses none.
    recompute: whether the backward pass may compute it a second time rather than save it.
    traits: what it does with its operands.
    call: which kind of call it is; `None` for one that is not entered.
  """

  list: str
  reason: str
  float16: str = ""
  recompute: bool = True
  traits: Trait = Trait.NONE
  call: CallKind | None = None
  reason_in_float16: str = ""
  collective: str = ""

  def __post_init__(self) -> None:
    if self.list not in LISTS:
      raise ValueError(f"unknown list {self.list!r}: expected one of {', '.join(LISTS)}")
    if self.float16 not in ("", "deny") or (self.float16 and self.list != "infer"):
      raise ValueError(
        f"float16={self.float16!r} with list={self.list!r}: expected 'deny' beside 'infer', or nothing"
      )
    if self.list == "call" and self.call is None:
      raise ValueError("list='call' without call: expected a CallKind, which says how its body is entered")

  def list_in(self, dtype: np.dtype | None) -> str:
    """Returns the list where `dtype` is the compute dtype."""
    return self.float16 if self.float16 and dtype == np.float16 else self.list

  def reason_in(self, dtype: np.dtype | None) -> str:
    """Returns the reason where `dtype` is the compute dtype."""
    in_float16 = self.reason_in_float16 if dtype == np.float16 else ""
    return in_float16 if self.float16 and in_float16 else "; ".join(filter(None, (self.reason, in_float16)))


# The rule for a primitive that is in no row, such as one that a later JAX adds or a library defines.
UNKNOWN = PrimitiveFacts("opaque", "mpjax does not know it, and leaves it as it is", recompute=False)

# By name. The primitive itself is beside it where JAX, or whoever defines it, has a public name for it.
_ROWS: dict[str, tuple[Primitive | None, PrimitiveFacts]] = {}
_SAME: dict[Primitive, Primitive] = {}  # primitives that are another, lowered in their own way
_FACTS: dict[Primitive, PrimitiveFacts] = {}  # what `facts` has found in these


def register(primitive: Primitive | str, row: PrimitiveFacts) -> None:
  """Adds a primitive to the table.

  Args:
    primitive: the primitive; its name only where it is JAX's and JAX has no public one for it.
    row: what is known of it.

  Raises:
    ValueError: if there is another row for it, or for another primitive of its name.
  """
  name = str(primitive)
  itself = primitive if isinstance(primitive, Primitive) else None
  known, known_row = _ROWS.get(name, (itself, row))
  if itself not in (known, None):
    raise ValueError(
      f"{name}: the table has a row for another primitive of this name, on {known_row.list!r}; "
      "give yours a name of its own, since mpjax.OpLists names primitives by it"
    )
  if known_row != row:
    raise ValueError(f"{name}: the table has another row for it already, on {known_row.list!r}")
  _ROWS[name] = known, row
  _FACTS.clear()


def register_as(primitive: Primitive, known: Primitive) -> None:
  """Says that a primitive is another one in all but its lowering: its name, parameters and facts."""
  _SAME[primitive] = known
  _FACTS.clear()


def rows() -> Iterator[tuple[str, PrimitiveFacts]]:
  """The table: name and facts of each primitive."""
  for name, (_, row) in _ROWS.items():
    yield name, row


def known_primitives() -> int:
  """Returns how many primitives the table has: it only grows."""
  return len(_ROWS) + len(_SAME)


def facts(what: JaxprEqn | Primitive) -> PrimitiveFacts:
  """The row of a primitive, or of an equation's; `UNKNOWN` if it has none, whatever its name."""
  primitive = what.primitive if isinstance(what, JaxprEqn) else what
  found = _FACTS.get(primitive)
  if found is None:
    found = _FACTS[primitive] = _row_of(_SAME.get(primitive, primitive))
  return found


def _row_of(primitive: Primitive) -> PrimitiveFacts:
  known, row = _ROWS.get(primitive.name, (primitive, UNKNOWN))
  return row if known is primitive or (known is None and defined_by_jax(primitive)) else UNKNOWN


def has(what: JaxprEqn | Primitive, traits: Trait) -> bool:
  """True if a primitive, or an equation's, has one of some traits."""
  return bool(facts(what).traits & traits)


def call_kind(equation: JaxprEqn) -> CallKind | None:
  """Returns which kind of call an equation is; `None` if it is not entered."""
  return facts(equation).call
