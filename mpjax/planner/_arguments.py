"""Sorts a step's arguments by part of memory: weights, optimiser state by slot, batch."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._types import PyTree
from mpjax.optim import Quantized
from mpjax.patterns import path_text
from mpjax.planner._array_bytes import itemsize, key_words, tiled_bytes
from mpjax.planner._results import ARGUMENT_PARTS
from mpjax.sharding import in_host_memory
from mpjax.step import TrainState

_FIELDS = {
  "step": "other state",
  "params": "master weights",
  "model_state": "model state",
  "opt_state": "optimizer state",
  "rng": "other state",
  "fp8_state": "FP8 state",
}
_PARTS_OF_NAMES = {
  "params": "master weights",
  "variables": "master weights",
  "weights": "master weights",
  "model": "master weights",
  "opt_state": "optimizer state",
  "optimizer_state": "optimizer state",
  "batch_stats": "model state",
  "model_state": "model state",
  "fp8_state": "FP8 state",
  "state": "other state",
  "rng": "other state",
  "key": "other state",
  "step": "other state",
}
_OF_KEYS = frozenset({"rng", "key", "step"})


@dataclasses.dataclass(frozen=True)
class Argument:
  """A leaf of a step's arguments.

  Attributes:
    part: one of `ARGUMENT_PARTS`.
    path: path in the arguments, such as `0/params/blocks/0/up/kernel`.
    slot: slot of an optimiser's state, such as `mu`; empty for other parts.
    nbytes: bytes on one device, without padding.
    whole: bytes on all devices together.
    elements: number of elements on all devices together.
    shape, dtype, sharding: as given.
  """

  part: str
  path: str
  slot: str
  nbytes: int
  whole: int
  elements: int
  shape: tuple[int, ...]
  dtype: Any
  sharding: Any

  @property
  def on_host(self) -> bool:
    """Returns whether it is in the host's memory between steps."""
    return in_host_memory(self)


def name_arguments(
  args: tuple[Any, ...], names: tuple[str, ...], donated: list[bool], parts: Mapping[str | int, str] | None
) -> list[Argument]:
  """Returns the part of every leaf, in the order of the flattened arguments.

  `parts` decides first. The fields of a `TrainState` name their parts. A NamedTuple of optax is optimiser
  state. Then the names of the step's parameters, and of fields and keys in them, decide (`params`,
  `opt_state`). An argument that is left is weights if its shapes equal those of a slot of the optimiser's
  state, or if the step may overwrite it (donated). All else is batch.

  Args:
    args: the step's arguments.
    names: names of the step's parameters; may be shorter than `args`.
    donated: for every leaf, whether it is donated.
    parts: from the name of a parameter, or its number, to a part.

  Raises:
    ValueError: for an unknown part, or a parameter that the step does not have.
  """
  given = {str(name): part for name, part in (parts or {}).items()}
  known = {*names, *(str(i) for i in range(len(args)))}
  for name, part in given.items():
    if part not in ARGUMENT_PARTS:
      raise ValueError(f"parts[{name!r}]={part!r}: expected one of {', '.join(ARGUMENT_PARTS)}")
    if name not in known:
      raise ValueError(
        f"parts has {name!r}: expected a parameter of the step, one of {', '.join(sorted(known))}"
      )
  found: list[Argument] = []
  flags = iter(donated)
  slots = _slot_shapes(args)
  for i, argument in enumerate(args):
    name = names[i] if i < len(names) else str(i)
    chosen = given.get(name, given.get(str(i)))
    like_slot = _shapes(argument) in slots
    for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
      found.append(_argument(i, name, argument, path, leaf, chosen, next(flags), like_slot))
  return found


def argument_bytes(argument: Argument, kind: str) -> int:
  """Returns the bytes of an argument on one device, in the compiler's layout."""
  if kind != "tpu":
    return argument.nbytes
  local = argument.sharding.shard_shape(argument.shape) if argument.sharding is not None else argument.shape
  if jax.dtypes.issubdtype(argument.dtype, jax.dtypes.prng_key):
    return tiled_bytes((*local, key_words(argument.dtype)), np.dtype(np.uint32))
  return tiled_bytes(local, argument.dtype)


def argument_parts(arguments: Sequence[Argument], kind: str) -> tuple[dict[str, int], dict[str, int]]:
  """Returns the bytes on a device by part, and the optimiser's bytes by slot and dtype."""
  parts: collections.Counter[str] = collections.Counter()
  slots: collections.Counter[str] = collections.Counter()
  for argument in arguments:
    if argument.on_host:
      continue
    nbytes = argument_bytes(argument, kind)
    parts[argument.part] += nbytes
    if argument.part == "optimizer state":
      slots[f"{argument.slot} {argument.dtype}" if argument.elements > 1 else "scalars"] += nbytes
  ordered = {name: parts[name] for name in ARGUMENT_PARTS if parts[name]}
  return ordered, dict(slots.most_common())


def _argument(
  i: int,
  name: str,
  argument: PyTree,
  path: tuple[Any, ...],
  leaf: jax.Array | jax.ShapeDtypeStruct,
  chosen: str | None,
  donated: bool,
  like_slot: bool,
) -> Argument:
  in_optax, slot = _optimizer_slot(argument, path)
  field = _train_state_field(argument, path)
  guess = "batch"
  if donated or like_slot:
    guess = "master weights" if _floating(leaf) else "other state"
  part = (
    chosen
    or ("optimizer state" if in_optax else None)
    or (_FIELDS[field] if field else None)
    or _by_name(name, path, leaf)
    or ("optimizer state" if slot else None)
    or guess
  )
  sharding = getattr(leaf, "sharding", None)
  local = sharding.shard_shape(tuple(leaf.shape)) if sharding is not None else tuple(leaf.shape)
  return Argument(
    part=part,
    path=f"{i}/{path_text(path)}".rstrip("/"),
    slot=slot if part == "optimizer state" else "",
    nbytes=math.ceil(math.prod(local) * itemsize(leaf.dtype)),
    whole=math.ceil(math.prod(leaf.shape) * itemsize(leaf.dtype)),
    elements=math.prod(leaf.shape),
    shape=tuple(leaf.shape),
    dtype=leaf.dtype,
    sharding=sharding,
  )


def _slot_shapes(args: tuple[Any, ...]) -> set[tuple[tuple[int, ...], ...]]:
  """Returns the leaf shapes of every slot of an optimiser's state."""
  slots: dict[tuple[int, str], list[tuple[int, ...]]] = {}
  for argument in args:
    for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
      in_optax, slot = _optimizer_slot(argument, path)
      if in_optax:
        slots.setdefault((id(argument), slot), []).append(tuple(leaf.shape))
  return {tuple(shapes) for shapes in slots.values() if any(shapes)}


def _shapes(tree: PyTree) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))


def _optimizer_slot(tree: PyTree, path: tuple[Any, ...]) -> tuple[bool, str]:
  """Returns whether a leaf is in a NamedTuple of optax, and its field in the innermost one."""
  in_optax, slot, node = False, "", tree
  for entry in path:
    if isinstance(node, tuple) and hasattr(node, "_fields") and hasattr(entry, "name"):
      in_optax |= type(node).__module__.startswith(("optax", "mpjax.loss_scale", "mpjax.optim"))
      if isinstance(node, Quantized):
        slot += " scales" if entry.name == "scales" else ""
      elif in_optax or (type(node).__name__.endswith("State") and not {*node._fields} & {*_PARTS_OF_NAMES}):
        slot = entry.name
    node = _child(node, entry)
  return in_optax, slot


def _train_state_field(tree: PyTree, path: tuple[Any, ...]) -> str | None:
  node = tree
  for entry in path:
    if isinstance(node, TrainState):
      return str(entry.name)
    node = _child(node, entry)
  return None


def _by_name(name: str, path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> str | None:
  """Returns the part that the first known name on a leaf's path stands for.

  Keys and counts have no floating elements: a layer with such a name is not one.
  """
  layer = _OF_KEYS if _floating(leaf) and leaf.shape else frozenset()
  for word in (name, *(str(getattr(e, "key", getattr(e, "name", ""))) for e in path)):
    if word in _PARTS_OF_NAMES and word not in layer:
      part = _PARTS_OF_NAMES[word]
      if word not in ("state", "model", "variables"):
        return part
  return {"model": "master weights", "variables": "master weights"}.get(name)


def _child(node: Any, entry: Any) -> Any:
  for get in (
    lambda: getattr(node, entry.name),
    lambda: node[entry.key],
    lambda: node[entry.idx],
  ):
    try:
      return get()
    except (AttributeError, KeyError, IndexError, TypeError):
      continue
  return None


def _floating(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, np.inexact)
