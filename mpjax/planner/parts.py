"""Which part of memory each argument of a step is: weights, optimiser state by slot, batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpjax.planner.graph import itemsize
from mpjax.planner.results import ARGUMENT_PARTS
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


@dataclasses.dataclass(frozen=True)
class Argument:
  """A leaf of a step's arguments.

  Attributes:
    part: one of `ARGUMENT_PARTS`.
    path: in the arguments, `0/params/blocks/0/up/kernel`.
    slot: of an optimiser's state, `mu`; empty otherwise.
    nbytes: on one device, without padding.
    whole: of all devices together.
    elements: how many, of all devices together.
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


def name_arguments(
  args: tuple[Any, ...], names: tuple[str, ...], donated: list[bool], parts: Mapping[str, str] | None
) -> list[Argument]:
  """The part of every leaf, in the order in which they are flattened.

  A `TrainState` says it itself. Elsewhere: what is in a NamedTuple of an optimiser library is optimiser
  state; the largest tree that has the structure of a slot of it is the weights; a leaf that is given up to
  the step (donated) is state; all else is batch. The names of the step's parameters (`params`, `opt_state`)
  and `parts` decide first.

  Args:
    args: the step's arguments.
    names: of its parameters; may be shorter.
    donated: of every leaf.
    parts: from the name of a parameter, or its number as text, to a part.

  Raises:
    ValueError: for a part that there is not, or a parameter that is not the step's.
  """
  given = dict(parts or {})
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
  for i, argument in enumerate(args):
    name = names[i] if i < len(names) else str(i)
    chosen = given.get(name, given.get(str(i)))
    for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
      found.append(_argument(i, name, argument, path, leaf, chosen, next(flags)))
  return found


def _argument(
  i: int, name: str, argument: Any, path: tuple[Any, ...], leaf: Any, chosen: str | None, donated: bool
) -> Argument:
  owner, slot = _optimizer_slot(argument, path)
  if chosen is not None:
    part = chosen
  elif owner is not None:
    part = "optimizer state"
  elif (key := _train_state_field(argument, path)) is not None:
    part = _FIELDS[key]
  else:
    part = _by_name(name, path) or (
      "master weights" if donated and _floating(leaf) else "other state" if donated else "batch"
    )
  whole = int(np.prod(leaf.shape, dtype=np.int64) * itemsize(leaf.dtype))
  sharding = getattr(leaf, "sharding", None)
  local = sharding.shard_shape(tuple(leaf.shape)) if sharding is not None else tuple(leaf.shape)
  return Argument(
    part=part,
    path=f"{i}/{jax.tree_util.keystr(path, simple=True, separator='/')}".rstrip("/"),
    slot=slot if part == "optimizer state" else "",
    nbytes=int(np.prod(local, dtype=np.int64) * itemsize(leaf.dtype)),
    whole=whole,
    elements=int(np.prod(leaf.shape, dtype=np.int64)),
    shape=tuple(leaf.shape),
    dtype=leaf.dtype,
    sharding=sharding,
  )


def _optimizer_slot(tree: Any, path: tuple[Any, ...]) -> tuple[Any, str]:
  """The optimiser's NamedTuple that a leaf is in, and the last of its fields that is not a wrapper's."""
  owner, slot, node = None, "", tree
  for entry in path:
    if isinstance(node, tuple) and hasattr(node, "_fields") and hasattr(entry, "name"):
      module = type(node).__module__
      if module.startswith(("optax", "mpjax")) or type(node).__name__.endswith("State"):
        owner, slot = node, entry.name
    node = _child(node, entry)
  return owner, slot


def _train_state_field(tree: Any, path: tuple[Any, ...]) -> str | None:
  node = tree
  for entry in path:
    if isinstance(node, TrainState):
      return str(entry.name)
    node = _child(node, entry)
  return None


def _by_name(name: str, path: tuple[Any, ...]) -> str | None:
  """The part that the first telling name on the way to a leaf says it is."""
  for word in (name, *(str(getattr(e, "key", getattr(e, "name", ""))) for e in path)):
    if word in _PARTS_OF_NAMES:
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


def _floating(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, np.inexact)
