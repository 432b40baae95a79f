"""Facts about primitives: autocast's decision, the use of operands, and the kind of call.

`_primitive_table.py` holds the facts, one row per primitive. Other modules use the functions here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from mpjax._compat import defined_by_jax


class Trait(enum.IntFlag):
  """Traits of a primitive: how it uses its operands."""

  if not TYPE_CHECKING:  # as integers: `enum` would take a fifth of the time of all decisions
    __and__, __or__, __invert__ = int.__and__, int.__or__, int.__invert__

  NONE = 0

  # Values that come out as they went in.
  ALIAS = enum.auto()  # each result is an operand's bytes, under another type, shape or order
  SAME_WEIGHT = enum.auto()  # the result is all of its operand: a transposed weight is still that weight
  PASSES_ON = enum.auto()  # the result consists of its operands' elements, which reach a product unchanged
  CAST = enum.auto()  # the operand's elements, rounded
  MOVES = enum.auto()  # results are elsewhere in memory, so a cast before it is not free
  EACH = enum.auto()  # each operand has its own result
  MARKS_AXES = enum.auto()  # declares the mesh axes over which a value varies: changes only types

  # Arithmetic.
  ELEMENTWISE = enum.auto()  # an element of the result depends on the operands' elements in its place
  BROADCASTS = enum.auto()  # it broadcasts operands of a smaller shape itself
  EXPONENTIAL = enum.auto()  # turns an absolute error into a relative one, or the other way round
  EXPANDS = enum.auto()  # its results may be far larger than its operands
  SCALES = enum.auto()  # a value decays or grows on its way through it
  ADDS = enum.auto()  # adds its operands, or the parts of devices: gradients pass it unchanged
  ACCUMULATES = enum.auto()  # sums elements, or products of them: linear in each operand
  PRODUCT = enum.auto()  # a matrix product or convolution
  KERNEL = enum.auto()  # a program in another language, made for the dtypes that it is traced with
  ALGEBRA = enum.auto()  # solves or factorises: a rounding error may make a matrix singular
  ORDERS = enum.auto()  # sorts values: equal ones keep their order

  # The backward pass.
  CHOICE = enum.auto()  # a sum or a choice: its gradient needs no operand, so its result is saved
  NO_RESIDUAL = enum.auto()  # its gradient needs neither operand nor result: nothing is saved for it

  # What a compiler stores.
  COSTLY = enum.auto()  # so expensive that it is stored for several readers, not recomputed by each
  READS_STORED = enum.auto()  # reads its operands from memory, and writes its results to it
  STORES_RESULT = enum.auto()  # fuses with the operations before it, and writes its result to memory
  IN_PLACE = enum.auto()  # may write its result over an operand


class CallKind(enum.Enum):
  """The kinds of higher-order primitives whose bodies mpjax reads."""

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
  UNIT = "unit"  # a body that a backend places or replaces as one; its operations may be read one by one

  @property
  def is_control_flow(self) -> bool:
    """Whether this is a loop or a conditional: its bodies run any number of times."""
    return self in (CallKind.SCAN, CallKind.WHILE, CallKind.COND)

  @property
  def is_custom_rule(self) -> bool:
    """Whether this has its own derivative or batching rule, which the body does not show."""
    return self in (CallKind.CUSTOM_JVP, CallKind.CUSTOM_VJP, CallKind.CUSTOM_VMAP)

  @property
  def runs_once(self) -> bool:
    """Whether its one body runs once, on the unchanged operands."""
    return self in (CallKind.JIT, CallKind.INLINE, CallKind.REMAT) or self.is_custom_rule

  @property
  def is_plain(self) -> bool:
    """Whether it consists of its bodies, whose equations may be emitted one by one."""
    return not self.is_custom_rule and self is not CallKind.UNIT


@dataclasses.dataclass(frozen=True)
class PrimitiveFacts:
  """A primitive's row in the table.

  Attributes:
    list: autocast's decision: `allow` (runs in the compute dtype), `deny` (runs in float32), `infer`
      (follows its operands), `opaque` (keeps the dtypes of the user's program) or `call` (a higher-order
      primitive, whose body is entered).
    reason: the reason for that list.
    float16: `deny` for a primitive on `infer` that is denied in float16 because of its range; else empty.
    in_float16: what float16's range adds to the reason; else empty.
    collective: XLA's name of the collective (`all-reduce`); empty if nothing crosses devices.
    recompute: whether the backward pass may recompute it instead of saving it.
    traits: how it uses its operands.
    call: the kind of call; `None` if it is not entered.
  """

  list: str
  reason: str
  float16: str = ""
  recompute: bool = True
  traits: Trait = Trait.NONE
  call: CallKind | None = None
  in_float16: str = ""
  collective: str = ""

  def list_in(self, dtype: np.dtype | None) -> str:
    """Returns the list if `dtype` is the compute dtype."""
    return self.float16 if self.float16 and dtype == np.float16 else self.list

  def reason_in(self, dtype: np.dtype | None) -> str:
    """Returns the reason if `dtype` is the compute dtype."""
    in_float16 = self.in_float16 if dtype == np.float16 else ""
    return in_float16 if self.float16 and in_float16 else "; ".join(filter(None, (self.reason, in_float16)))


# The rule for a primitive without a row, such as one from a newer JAX or another library.
UNKNOWN = PrimitiveFacts("opaque", "mpjax does not know it, and leaves it as it is", recompute=False)

# By name, with the primitive itself if JAX, or its library, has a public name for it.
_ROWS: dict[str, tuple[Primitive | None, PrimitiveFacts]] = {}
_SAME: dict[Primitive, Primitive] = {}  # primitives that equal another one, with their own lowering


def register(primitive: Primitive | str, row: PrimitiveFacts) -> None:
  """Adds a primitive to the table: itself, or its name if it is JAX's and has no public name."""
  name, itself = str(primitive), primitive if isinstance(primitive, Primitive) else None
  known, _ = _ROWS.get(name, (None, row))  # under two names of JAX's
  _ROWS[name] = itself or known, row
  _row_of.cache_clear()


def register_as(primitive: Primitive, known: Primitive) -> None:
  """Declares that a primitive equals another one except in its lowering: same name, parameters and facts."""
  _SAME[primitive] = known
  _row_of.cache_clear()


def rows() -> Iterator[tuple[str, PrimitiveFacts]]:
  """Yields the table: name and facts of each primitive."""
  for name, (_, row) in _ROWS.items():
    yield name, row


def known_primitives() -> int:
  """Returns how many primitives the table has; it only grows."""
  return len(_ROWS) + len(_SAME)


def facts(what: JaxprEqn | Primitive) -> PrimitiveFacts:
  """Returns the row of a primitive or an equation's primitive; `UNKNOWN` without a row."""
  return _row_of(what.primitive if isinstance(what, JaxprEqn) else what)


@functools.cache
def _row_of(primitive: Primitive) -> PrimitiveFacts:
  primitive = _SAME.get(primitive, primitive)
  known, row = _ROWS.get(primitive.name, (primitive, UNKNOWN))
  return row if known is primitive or (known is None and defined_by_jax(primitive)) else UNKNOWN


def has(what: JaxprEqn | Primitive, traits: Trait) -> bool:
  """Returns whether a primitive, or an equation's, has one of some traits."""
  return bool(facts(what).traits & traits)


def call_kind(equation: JaxprEqn) -> CallKind | None:
  """Returns an equation's kind of call; `None` if it is not entered."""
  return facts(equation).call
