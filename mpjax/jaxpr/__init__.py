"""What is true of a jaxpr, whoever asks: primitives, scopes, bodies, walks."""

from mpjax.jaxpr import _primitive_table as _primitive_table
from mpjax.jaxpr._bodies import alignment
from mpjax.jaxpr._flops import flops, taps
from mpjax.jaxpr._primitives import (
  LISTS,
  UNKNOWN,
  CallKind,
  PrimitiveFacts,
  Trait,
  call_kind,
  facts,
  has,
  register,
  rows,
)

__all__ = [
  "LISTS",
  "UNKNOWN",
  "CallKind",
  "PrimitiveFacts",
  "Trait",
  "alignment",
  "call_kind",
  "facts",
  "flops",
  "has",
  "register",
  "rows",
  "taps",
]
