"""The parts of a checkpoint with their checksums: made at a save, compared at a restore."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from mpjax.train.checkpoints._checksums import (
  Examined,
  NonFiniteLeaves,
  beyond,
  examine,
  json_checksum,
  tree_kinds,
)
from mpjax.train.checkpoints._orbax_errors import reason
from mpjax.train.multiprocess import everyone

# Where the loop's part holds the checksum of the checksums.
_SEAL = "integrity"
# Where integrity has which leaves held NaN or infinity in the state that the run began with.
_BEGUN = "begun_with"
# What has to be finite: all of a state but its counters and keys, and FP8 histories, which forget.
_FINITE_FIELDS = ("params", "model_state", "opt_state")


class Damaged(Exception):
  """A checkpoint is not what was saved; the message says which part."""

  what = "is damaged"


class NotFinite(Damaged):
  """A checkpoint is of a state with NaN or infinity, from which no run can go on; the message says where."""

  what = "is not finite"


class OtherState(Exception):
  """A checkpoint is whole, and of another state than was asked for."""


class Parts(NamedTuple):
  """The parts of a checkpoint, `integrity` with the checksums of the others.

  `begun_with` is what leaves of the run's first state held that is not finite, such as the best loss so far.
  """

  state: dict[str, Any]
  data: Any
  loop: dict[str, Any]
  integrity: dict[str, Any]

  @property
  def begun_with(self) -> NonFiniteLeaves:
    return self.integrity.get(_BEGUN, {})


def sealed(
  state: dict[str, Any],
  data: object,
  loop: dict[str, Any],
  metrics: dict[str, Any],
  origin: dict[str, Any],
  examined: Examined,
  begun_with: NonFiniteLeaves,
) -> Parts:
  """Returns the parts of a checkpoint with their checksums, to be saved; a copy of what is not arrays.

  Args:
    state, data, loop, metrics: what to save.
    origin: what the checkpoint is of: its step, and the run.
    examined: of the state.
    begun_with: what leaves of the run's first state held that is not finite.
  """
  # Written by a thread, while the caller may go on to change its own.
  data, loop = copy.deepcopy((data, loop))
  integrity: dict[str, Any] = {"kinds": tree_kinds(state), "state": examined.checksums} | {
    name: json_checksum(part) for name, part in {"data": data, "loop": loop, "metrics": metrics}.items()
  }
  integrity["origin"] = origin
  if begun_with:
    integrity[_BEGUN] = begun_with
  return Parts(state, data, loop | {_SEAL: json_checksum(integrity)}, integrity)


def nonfinite(examined: Examined, begun_with: NonFiniteLeaves) -> NonFiniteLeaves:
  """Returns the leaves of an examined state that hold NaN or infinity and did not when the run began.

  Some begin with infinity and may keep it: the best loss so far (`optax.contrib.reduce_on_plateau`), a mask.
  """
  held = {path: kinds for path, kinds in examined.nonfinite.items() if path.split("/")[0] in _FINITE_FIELDS}
  return beyond(held, begun_with)


def nonfinite_text(nonfinite: NonFiniteLeaves) -> str:
  """Returns the first leaves that are not finite, and how many there are, for a person."""
  shown = [f"{path} holds {' and '.join(kinds)}" for path, kinds in list(nonfinite.items())[:3]]
  return ", ".join(shown) + (f", and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else "")


def read(
  folder: pathlib.Path,
  like: dict[str, Any],
  metrics: object,
  timeout_s: int,
  foreign: Callable[[dict[str, Any]], str | None],
) -> Parts:
  """Reads the parts of a checkpoint, as they were given to `sealed`; in every process, or in none.

  Args:
    folder: the checkpoint.
    like: abstract arrays with the structure, dtypes and shardings to restore the state with.
    metrics: what has been read as its metrics.
    timeout_s: how long one process waits for the others, in seconds.
    foreign: of what a checkpoint is of, why it does not belong here; `None` if it does.

  Raises:
    Damaged: if a part cannot be read in some process, is not what was saved, or belongs elsewhere.
    NotFinite: if the state holds NaN or infinity.
    OtherState: if the state has other leaves, dtypes or shapes than `like`.
    TimeoutError: if another process did not come.
  """
  parts, outcome = None, ("", "")
  try:
    parts = _read(folder, like, metrics, foreign)
  except OtherState as error:
    outcome = ("other", str(error))
  except Damaged as error:
    outcome = ("damaged", str(error))
  except Exception as error:  # whatever it is, the others have to hear of it
    outcome = ("damaged", reason(error))
  outcomes = [json.loads(text) for text in everyone(json.dumps(outcome), timeout_s)]
  kind, text = next((outcome for outcome in outcomes if outcome[0]), ("", ""))
  if parts is None or kind:
    raise (OtherState if kind == "other" else Damaged)(text)
  examined = examine(parts.state)
  # A key of which the description is lost comes back as numbers, with the same bits.
  _compare(parts.integrity["kinds"], tree_kinds(parts.state))
  _compare(parts.integrity["state"], examined.checksums)
  if held := nonfinite(examined, parts.begun_with):
    raise NotFinite(nonfinite_text(held))
  return parts


def _read(
  folder: pathlib.Path,
  like: dict[str, Any],
  metrics: object,
  foreign: Callable[[dict[str, Any]], str | None],
) -> Parts:
  """Reads in this process, without comparing checksums of arrays, for which it needs the others."""
  data, loop = _read_json(folder, "data"), _read_json(folder, "loop")
  seal, integrity = loop.pop(_SEAL, None), _read_json(folder, "integrity")
  if json_checksum(integrity) != seal:
    raise Damaged("integrity or loop: not what was saved")
  for name, part in {"data": data, "loop": loop, "metrics": metrics}.items():
    if json_checksum(part) != integrity[name]:
      raise Damaged(f"{name}: not what was saved")
  if (problem := foreign(integrity["origin"])) is not None:
    raise Damaged(problem)
  kinds, saved = tree_kinds(like), integrity["kinds"]
  differ = sorted(path for path in kinds.keys() | saved.keys() if kinds.get(path) != saved.get(path))
  if differ:
    there, here = (found.get(differ[0], "not there") for found in (saved, kinds))
    raise OtherState(f"{differ[0]} is {there} in the checkpoint and {here} in this run")
  try:
    # Not through the manager, whose barriers would wait for a process that met the damage and left.
    state = ocp.StandardCheckpointHandler().restore(folder / "state", args=ocp.args.StandardRestore(like))
  except Exception as error:  # of any kind: damage can show in every layer that reads
    raise Damaged(f"state: {reason(error)}") from error
  return Parts(state, data, loop, integrity)


def _compare(saved: dict[str, str], found: dict[str, str]) -> None:
  differ = [f"state/{path}" for path in saved if found.get(path) != saved[path]]
  if differ:
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    raise Damaged(f"{differ[0]}{more}: not what was saved")


def _read_json(folder: pathlib.Path, name: str) -> Any:
  try:
    return ocp.JsonCheckpointHandler().restore(folder / name)
  except (OSError, ValueError) as error:
    raise Damaged(f"{name}: {reason(error)}") from error
