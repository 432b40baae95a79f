"""The kinds of float32 value that autocast distinguishes, and what they make where they meet."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray

from mpjax._types import Array, ArrayLike, Atom, PyTree
from mpjax.jaxpr import shape_of

FLOAT32 = np.dtype("float32")
_HALVES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


class Kind(enum.IntEnum):
  """The kinds of value that autocast distinguishes, the strongest first."""

  FIXED = 1  # no float32 in the program: an integer, float64, or half precision by the user's choice
  PINNED = 2  # cast to float32 by the user, or a gradient that has left its backward pass
  RUNNING = 3  # the carry of a loop that remembers many steps, inside that loop
  STATISTIC = 4  # what a reduction left: a sum, a mean, a maximum
  HALF = 5  # a matrix product's result, and what follows from it
  ISLAND = 6  # computed in float32 from half precision; half precision again where it meets that
  FLEXIBLE = 7  # a parameter, an input or a literal, or of those alone: follows what it meets


class Wide(enum.IntEnum):
  """Whether a value is known to hold numbers that the half dtype cannot, and what rounding makes of them."""

  NO = 0
  SATURATES = 1  # a constant or a mask, such as -1e9: the largest numbers of the half dtype
  OVERFLOWS = 2  # anything else, as with a cast by hand: infinity, or zero for an epsilon of 1e-8


class Held(NamedTuple):
  """A value as autocast holds it.

  Attributes:
    kind: its kind.
    dtype: the dtype it is held in.
    wide: whether it is known to hold numbers that the half dtype cannot.
  """

  kind: Kind
  dtype: np.dtype
  wide: Wide = Wide.NO


def strongest(held: Iterable[Held]) -> Kind:
  """Returns the kind that decides where values meet."""
  return min(h.kind for h in held)


def joined(held: Sequence[Held], kind: Kind, half: np.dtype | None = None) -> Held:
  """Returns how the result of values that meet is held, if it is of a kind.

  Args:
    held: how they are held; at least one.
    kind: the kind of the result.
    half: the dtype of a result in half precision; by default that of the first among them.
  """
  wide = max(h.wide for h in held)
  if kind is Kind.FIXED:
    return held[0]._replace(wide=wide)
  if kind is Kind.HALF:
    return Held(kind, half or next(h.dtype for h in held if h.kind is Kind.HALF))
  return Held(kind, FLOAT32, wide)


def computed_from(held: Sequence[Held], shrinks: bool = False) -> Held:
  """Returns how a result of a float32 operation is held; `shrinks` if it is a reduction's, or of such."""
  kind = strongest(held)
  if kind not in (Kind.FIXED, Kind.FLEXIBLE):
    kind = Kind.STATISTIC if shrinks else Kind.PINNED if kind is Kind.PINNED else Kind.ISLAND
  return joined(held, kind)


def castable(aval: AbstractValue) -> bool:
  """Returns whether autocast may choose the dtype of a value: float32 arrays only, not references to one."""
  return getattr(aval, "dtype", None) == FLOAT32 and not hasattr(aval, "inner_aval")


def size(atom: Atom) -> int:
  """Returns the number of elements of a variable or literal; a symbolic dimension counts as a large one."""
  return math.prod(d if isinstance(d, int) else 1024 for d in shape_of(atom))


def is_float(aval: AbstractValue) -> bool:
  """Returns whether a value is an array of real floating numbers."""
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_half(aval: AbstractValue) -> bool:
  """Returns whether a value is an array in float16 or bfloat16."""
  return is_float(aval) and getattr(aval, "dtype", FLOAT32).itemsize == 2


def small(held: Sequence[Held]) -> bool:
  """Returns whether values are only statistics and parameters."""
  return {h.kind for h in held} <= {Kind.STATISTIC, Kind.FLEXIBLE}


def of_its_own(aval: AbstractValue) -> bool:
  """Returns whether a value is in a floating dtype that the user chose."""
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and not castable(aval) and jax.numpy.issubdtype(dtype, np.inexact)


def own_types(arguments: PyTree) -> set[tuple[tuple[int, ...], np.dtype]]:
  """Returns the shapes and dtypes of half-precision arguments; results of these types keep their dtype."""
  arrays = (leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
  return {(leaf.shape, leaf.dtype) for leaf in arrays if leaf.dtype in _HALVES}


def initial(aval: AbstractValue, value: ArrayLike | None = None, half: np.dtype | None = None) -> Held:
  """Returns how an input of a program is held, or a constant or literal with a known value."""
  if not castable(aval):
    return Held(Kind.FIXED, cast(np.dtype, getattr(aval, "dtype", None)))
  return Held(Kind.FLEXIBLE, FLOAT32, Wide.NO if value is None or half is None else width(value, half))


def width(value: ArrayLike, half: np.dtype) -> Wide:
  """Returns what rounding to `half` makes of finite numbers."""
  value = np.asarray(value)
  with np.errstate(over="ignore", under="ignore"):
    rounded = value.astype(half).astype(np.float32)
  if np.any(np.isinf(rounded) & np.isfinite(value)):
    return Wide.SATURATES
  return Wide.OVERFLOWS if np.any((rounded == 0) & (value != 0)) else Wide.NO


def as_held(x: Array, held: Held) -> Array:
  """Casts an array to the dtype that a value is held in."""
  return x if held.kind is Kind.FIXED else as_dtype(x, held.dtype)


def as_dtype(x: Array, dtype: np.dtype) -> Array:
  """Casts an array, in its own mesh."""
  if x.dtype == dtype:
    return x
  with in_mesh_of(jax.typeof(x)):
    return jax.lax.convert_element_type(x, dtype)


def in_mesh_of(aval: AbstractValue) -> contextlib.AbstractContextManager[object]:
  """Enters the mesh of an array's type, if another is set: `auto_axes` has its own.

  Args:
    aval: the type of an array, as `jax.typeof` gives it.
  """
  mesh, around = cast(ShapedArray, aval).sharding.mesh, jax.sharding.get_abstract_mesh()
  if mesh.empty or around.empty or mesh == around:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh)
