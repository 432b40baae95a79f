"""`OpLists`: the primitives that run in half precision, in float32, or in the dtype of their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from mpjax._types import DTypeLike
from mpjax.dtypes import did_you_mean
from mpjax.jaxpr import rows


@dataclasses.dataclass(frozen=True)
class OpLists:
  """The lists that autocast decides by: sets of primitive names, as `jax.make_jaxpr` prints them.

  ```python
  ops = mpjax.OpLists.default()
  ops = ops.replace(deny=ops.deny | {"tanh"})
  loss = mpjax.autocast(loss_fn, "bf16", ops=ops)
  ```

  Attributes:
    allow: run in the policy's compute dtype (matrix products, convolutions).
    deny: run in float32.
    deny_float16: run in float32 if the compute dtype is float16, and follow their inputs in bfloat16,
      which has float32's range.
    infer: follow their inputs.
    opaque: left in the dtypes of the user's program, like a primitive on no list.
    call: higher-order primitives, whose bodies are entered.
  """

  allow: frozenset[str]
  deny: frozenset[str]
  deny_float16: frozenset[str]
  infer: frozenset[str]
  opaque: frozenset[str]
  call: frozenset[str]

  def __post_init__(self) -> None:
    seen: dict[str, str] = {}
    for field in _FIELDS:
      names = getattr(self, field)
      if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}={names!r}: expected names of primitives, such as {{'dot_general'}}")
      object.__setattr__(self, field, frozenset(names))
      for name in names:
        if name in seen:
          raise ValueError(f"primitive {name!r} is on two lists, {seen[name]} and {field}")
        seen[name] = field

  @classmethod
  def default(cls) -> OpLists:
    """Returns the lists of `mpjax/jaxpr/_primitive_table.py`, which gives the reason for each."""
    lists: dict[str, set[str]] = {field: set() for field in _FIELDS}
    for name, row in rows():
      lists["deny_float16" if row.float16 == "deny" else row.list].add(name)
    return cls(**{field: frozenset(names) for field, names in lists.items()})

  def replace(self, **lists: Iterable[str]) -> OpLists:
    """Returns a copy with some lists replaced; a name moves from its old list to the new one.

    `ops.replace(deny=ops.deny | {"tanh"})` adds to a list. A name that is removed from its list goes to
    `infer`.

    Raises:
      ValueError: for an unknown list or name, or a name on two lists.
    """
    for field in lists:
      if field not in _FIELDS:
        raise ValueError(
          f"unknown list {field!r}: expected one of {', '.join(_FIELDS)}" + did_you_mean(field, _FIELDS)
        )
    new = {field: frozenset(_names(field, names)) for field, names in lists.items()}
    known = frozenset().union(*(getattr(self, field) for field in _FIELDS))
    given: frozenset[str] = frozenset().union(*new.values())
    result = {field: new.get(field, getattr(self, field) - given) for field in _FIELDS}
    dropped = known - frozenset().union(*result.values())
    result["infer"] |= dropped
    return OpLists(**result)

  def of(self, primitive: str, dtype: DTypeLike) -> str:
    """Returns the list that a primitive is on: allow, deny, infer, opaque or call.

    Args:
      primitive: its name.
      dtype: the compute dtype.
    """
    for field in ("allow", "deny", "infer", "call"):
      if primitive in getattr(self, field):
        return field
    if primitive in self.deny_float16:
      return "deny" if np.dtype(dtype) == np.float16 else "infer"
    return "opaque"


_FIELDS = tuple(field.name for field in dataclasses.fields(OpLists))


def changed(ops: OpLists) -> frozenset[str]:
  """Returns the names of primitives that are on another list than by default."""
  default = OpLists.default()
  return frozenset().union(*(getattr(ops, field) ^ getattr(default, field) for field in _FIELDS))


def _names(field: str, names: Iterable[str]) -> Iterable[str]:
  if isinstance(names, str):
    raise ValueError(f"{field}={names!r}: expected a set of names of primitives, such as {{{names!r}}}")
  return names
