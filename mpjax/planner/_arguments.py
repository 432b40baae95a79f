"""A step's arguments by part of memory (weights, optimiser state by slot, batch), and bytes of arrays.

A TPU pads the two minor dimensions to whole tiles of 8 x 128 elements, or of fewer rows. The rule was read
off the layouts that the compiler chooses for arguments (OpenXLA, Tiled layout, explains the notation): the
compiler takes an order of dimensions with the least padding.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._types import PyTree
from mpjax.optim import Quantized
from mpjax.planner._results import ARGUMENT_PARTS
from mpjax.sharding import in_host_memory

_PARTS_OF_NAMES = {
  **dict.fromkeys(("params", "variables", "weights", "model"), "master weights"),
  **dict.fromkeys(("opt_state", "optimizer_state"), "optimizer state"),
  **dict.fromkeys(("batch_stats", "model_state"), "model state"),
  "fp8_state": "FP8 state",
  **dict.fromkeys(("rng", "key", "step"), "other state"),
}
_LANES = 128
_SUBLANES = 8
_LEAST = 512  # bytes
_CONTAINERS = ("state", "variables", "model")  # of which keys at the root may tell more


@dataclasses.dataclass(frozen=True)
class Argument:
  """A leaf of a step's arguments.

  Attributes:
    part: one of `ARGUMENT_PARTS`.
    slot: slot of an optimiser's state, such as `mu`; empty for other parts.
    shape, dtype, sharding: as given.
    kind: kind of the platform, whose layout it has.
  """

  part: str
  slot: str
  shape: tuple[int, ...]
  dtype: Any
  sharding: Any
  kind: str

  @property
  def elements(self) -> int:
    """Number of elements on all devices together."""
    return math.prod(self.shape)

  @property
  def whole(self) -> int:
    """Bytes on all devices together."""
    return math.ceil(self.elements * itemsize(self.dtype))

  @property
  def local(self) -> tuple[int, ...]:
    """The shape on one device."""
    return self.sharding.shard_shape(self.shape) if self.sharding is not None else self.shape

  @property
  def nbytes(self) -> int:
    """Bytes on one device, in the compiler's layout."""
    return array_bytes(self.local, self.dtype, self.kind)

  @property
  def on_host(self) -> bool:
    """Returns whether it is in the host's memory between steps."""
    return in_host_memory(self)


def name_arguments(
  args: tuple[Any, ...], names: tuple[str, ...], parts: Mapping[str | int, str] | None, kind: str
) -> list[Argument]:
  """Returns the part of every leaf, in the order of the flattened arguments.

  `parts` decides first. A NamedTuple of optax is optimiser state. Then the name of the step's parameter
  (`params`) decides, or a key or field at its root (`opt_state`), as in a `TrainState`. If none of these
  tells the weights, they are the first argument. All else is batch. Weights are floating, keys and counts
  are not.

  Args:
    args: the step's arguments.
    names: names of the step's parameters; may be shorter than `args`.
    parts: from the name of a parameter, or its number, to a part.
    kind: kind of the platform.

  Raises:
    ValueError: for an unknown part, or a parameter that the step does not have.
  """
  given = {str(name): part for name, part in (parts or {}).items()}
  known = {*names, *map(str, range(len(args)))}
  for name, part in given.items():
    if part not in ARGUMENT_PARTS:
      raise ValueError(f"parts[{name!r}]={part!r}: expected one of {', '.join(ARGUMENT_PARTS)}")
    if name not in known:
      raise ValueError(
        f"parts has {name!r}: expected a parameter of the step, one of {', '.join(sorted(known))}"
      )
  found: list[Argument] = []
  for i, argument in enumerate(args):
    name = names[i] if i < len(names) else str(i)
    chosen = given.get(name, given.get(str(i)))
    for path, leaf, slot in _leaves(argument):
      otherwise = "" if i == 0 and jax.dtypes.issubdtype(leaf.dtype, np.inexact) else "batch"
      part = chosen or ("optimizer state" if slot else _by_name(name, path, leaf.dtype)) or otherwise
      slot, sharding = slot if part == "optimizer state" else "", getattr(leaf, "sharding", None)
      found.append(Argument(part, slot, tuple(leaf.shape), leaf.dtype, sharding, kind))
  first = "batch" if any(a.part == "master weights" for a in found) else "master weights"
  return [a if a.part else dataclasses.replace(a, part=first) for a in found]


def argument_parts(arguments: Sequence[Argument]) -> tuple[dict[str, int], dict[str, int]]:
  """Returns the bytes on a device by part, and the optimiser's bytes by slot and dtype."""
  parts: collections.Counter[str] = collections.Counter()
  slots: collections.Counter[str] = collections.Counter()
  for a in arguments:
    nbytes = 0 if a.on_host else a.nbytes
    parts[a.part] += nbytes
    if a.part == "optimizer state" and nbytes:
      slots[f"{a.slot} {a.dtype}" if a.elements > 1 else "scalars"] += nbytes
  ordered = {name: parts[name] for name in ARGUMENT_PARTS if parts[name]}
  return ordered, dict(slots.most_common())


def _leaves(tree: PyTree, path: jax.tree_util.KeyPath = (), slot: str = "") -> Iterator[tuple[Any, Any, str]]:
  """Yields the path of each leaf, the leaf, and its field in the innermost NamedTuple of optax."""
  for place, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_optimizers)[0]:
    for field in node._fields if _is_optimizers(node) else ():
      of = f"{slot}{' scales' if field == 'scales' else ''}" if isinstance(node, Quantized) else field
      yield from _leaves(getattr(node, field), (*path, *place, jax.tree_util.GetAttrKey(field)), of)
    if not _is_optimizers(node):
      yield (*path, *place), node, slot


def _is_optimizers(node: object) -> bool:
  """Returns whether a node is a part of an optimiser's state, by its type."""
  is_named = isinstance(node, tuple) and hasattr(node, "_fields")
  return is_named and type(node).__module__.startswith(("optax", "mpjax.loss_scale", "mpjax.optim"))


def _by_name(name: str, path: jax.tree_util.KeyPath, dtype: Any) -> str:
  """Returns the part that an argument's name or a key at its root stands for; empty if neither tells."""
  roots = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path[:1]]
  words = (*roots, name) if name in _CONTAINERS else (name, *roots)
  found = [_PARTS_OF_NAMES[word] for word in words if word in _PARTS_OF_NAMES]
  # A layer may be called `key`, and a module may hold keys and counts.
  unlike, like = "master weights", "other state"
  if jax.dtypes.issubdtype(dtype, np.inexact):
    unlike, like = "other state", ""
  return next((part for part in found if part != unlike), like if found else "")


def itemsize(dtype: object) -> float:
  """Returns the bytes of an element; a PRNG key counts as its 32-bit words."""
  if isinstance(dtype, np.dtype):
    bits = re.search(r"\d+", dtype.name)
    return 0 if dtype == "V" else int(bits[0]) / 8 if bits else dtype.itemsize
  return 4 * _key_words(dtype)


@functools.cache
def _key_words(dtype: object) -> int:
  """Returns the number of 32-bit words of a PRNG key of a dtype."""
  key = jax.ShapeDtypeStruct((), dtype)
  return math.prod(jax.eval_shape(jax.random.key_data, key).shape)


def array_bytes(shape: tuple[int, ...], dtype: Any, kind: str) -> int:
  """Returns the bytes of an array on a kind of platform."""
  if kind != "tpu":
    return math.ceil(math.prod(shape) * itemsize(dtype))
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    shape, dtype = (*shape, _key_words(dtype)), np.dtype(np.uint32)
  return tiled_bytes(shape, dtype)


def tiled_bytes(shape: tuple[int, ...], dtype: object) -> int:
  """Returns the bytes of an array of this shape and dtype on a TPU, padding included."""
  size = itemsize(dtype)
  if not shape:
    return _LEAST
  if 0 in shape:
    return 0
  packing = max(1, int(4 // size)) if size else 1
  if len(shape) == 1:
    return int(_in_tiles(shape[0], _LANES * packing, _LANES * _SUBLANES) * size)
  pairs = list(itertools.permutations(shape, 2))  # rows, columns
  best = min(_in_tiles(m, packing, _SUBLANES) * _in_tiles(n, _LANES, _LANES) / (m * n) for m, n in pairs)
  return round(math.prod(shape) * best * size)


def _in_tiles(n: int, least: int, most: int) -> int:
  """Returns n rounded up to tiles of the smallest power of two that holds it, within bounds."""
  tile = least
  while tile < min(n, most):
    tile *= 2
  return -(-n // tile) * tile
