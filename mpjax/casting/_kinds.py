"""How autocast holds a float32 value of the user's program, and what becomes of it where values meet."""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

FLOAT32 = np.dtype("float32")


class Kind(enum.Enum):
  """What a value is to autocast."""

  FIXED = "fixed"  # not float32 in the user's program: keeps its dtype
  FLEXIBLE = (
    "flexible"  # a parameter, an input, a literal, or computed from those alone: follows what it meets
  )
  HALF = "half"  # held in the compute dtype
  ISLAND = "island"  # computed in float32 from half precision; half again where it meets that
  STATISTIC = "statistic"  # what a reduction left: small, and keeps what it meets in float32
  RUNNING = "running"  # a sum over the steps of a loop: keeps what it meets in float32
  PINNED = "pinned"  # cast to float32 by the user: keeps what it meets in float32


class Held(NamedTuple):
  """A value as autocast holds it.

  Attributes:
    kind: see `Kind`.
    dtype: the dtype it is held in.
    wide: whether it is known to hold values that the half dtype cannot (a mask of -1e9, an epsilon of 1e-8).
  """

  kind: Kind
  dtype: Any
  wide: bool = False


def castable(aval: Any) -> bool:
  """Whether autocast may choose the dtype of a value: float32 arrays only, not references to one."""
  return getattr(aval, "dtype", None) == FLOAT32 and not hasattr(aval, "inner_aval")


def size(atom: Any) -> int:
  """Number of elements of a jaxpr's variable or literal; a symbolic dimension counts as a large one."""
  return math.prod(d if isinstance(d, int) else 1024 for d in getattr(atom.aval, "shape", ()))


def is_float(aval: Any) -> bool:
  """Whether a value is an array of real floating numbers."""
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def initial(aval: Any, value: Any = None, half: Any = None) -> Held:
  """An input of a program, or a constant or literal whose value is known."""
  dtype = getattr(aval, "dtype", None)
  if not castable(aval):
    return Held(Kind.FIXED, dtype)
  return Held(Kind.FLEXIBLE, dtype, value is not None and half is not None and not fits(value, half))


def fits(value: Any, half: Any) -> bool:
  """Whether numbers that are finite, or not zero, stay so in `half`."""
  value = np.asarray(value)
  with np.errstate(over="ignore", under="ignore"):
    cast = value.astype(half).astype(np.float32)
  return bool(np.all((np.isfinite(cast) | ~np.isfinite(value)) & ((cast != 0) | (value == 0))))


def meet(helds: list[Held], shrank: bool) -> Held:
  """What an operation that follows its inputs makes of them: where it runs, and what its result is.

  Args:
    helds: of its float32 operands, at least one.
    shrank: whether the result is no larger than the largest statistic among them.
  """
  kinds = {held.kind for held in helds}
  wide = any(held.wide for held in helds)
  for kind in (Kind.PINNED, Kind.RUNNING):
    if kind in kinds:
      return Held(kind, FLOAT32)
  if Kind.STATISTIC in kinds:
    small = kinds <= {Kind.STATISTIC, Kind.FLEXIBLE}
    return Held(Kind.STATISTIC if small and shrank else Kind.ISLAND, FLOAT32, wide)
  if Kind.HALF in kinds:
    dtype = next(held.dtype for held in helds if held.kind is Kind.HALF)
    return Held(Kind.ISLAND, FLOAT32, True) if wide else Held(Kind.HALF, dtype)
  if Kind.ISLAND in kinds:
    return Held(Kind.ISLAND, FLOAT32, wide)
  return Held(Kind.FLEXIBLE, FLOAT32, wide)
