"""The parts of a checkpoint and their checksums, which a save makes and a restore compares."""

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
from mpjax.train.processes import everyone

# The key in the loop's part for the checksum of the checksums.
_SEAL = "integrity"
# The key in `integrity` for the leaves that held NaN or infinity in the run's first state.
_BEGUN = "begun_with"
# Fields that must be finite. Counters and keys are integers, and FP8 histories forget NaN.
_FINITE_FIELDS = ("params", "model_state", "opt_state")


class Damaged(Exception):
  """A checkpoint differs from what was saved; the message names the part."""

  what = "is damaged"


class NotFinite(Damaged):
  """A checkpoint holds NaN or infinity, so no run can resume from it; the message says where."""

  what = "is not finite"


class OtherState(Exception):
  """A checkpoint is good, but its state has another structure than the one requested."""


class Parts(NamedTuple):
  """The parts of a checkpoint; `integrity` has the checksums of the others.

  `begun_with` has the NaN and infinity of the run's first state, such as an infinite "best loss so far".
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
  """Returns the parts of a checkpoint to save, with their checksums. Copies everything but arrays.

  Args:
    state, data, loop, metrics: what to save.
    origin: the step and the run of the checkpoint.
    examined: what `examine` returns for the state.
    begun_with: the NaN and infinity of the run's first state.
  """
  # A thread writes them, and the caller may change its own meanwhile.
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

  Some leaves may start with infinity: the best loss so far (`optax.contrib.reduce_on_plateau`), a mask.
  """
  held = {path: kinds for path, kinds in examined.nonfinite.items() if path.split("/")[0] in _FINITE_FIELDS}
  return beyond(held, begun_with)


def nonfinite_text(nonfinite: NonFiniteLeaves) -> str:
  """Describes the first three leaves that are not finite, and says how many more there are."""
  shown = [f"{path} holds {' and '.join(kinds)}" for path, kinds in list(nonfinite.items())[:3]]
  return ", ".join(shown) + (f", and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else "")


def read(
  folder: pathlib.Path,
  like: dict[str, Any],
  metrics: object,
  timeout_s: int,
  foreign: Callable[[dict[str, Any]], str | None],
) -> Parts:
  """Reads the parts of a checkpoint, as `sealed` got them. Either all processes succeed or all raise.

  Args:
    folder: the checkpoint.
    like: abstract arrays with the structure, dtypes and shardings to restore the state with.
    metrics: the checkpoint's metrics, which were read already.
    timeout_s: how long one process waits for the others, in seconds.
    foreign: takes the checkpoint's origin; returns why it does not belong here, or `None` if it does.

  Raises:
    Damaged: if a process cannot read a part, or a part is not what was saved or belongs elsewhere.
    NotFinite: if the state holds NaN or infinity.
    OtherState: if the state has other leaves, dtypes or shapes than `like`.
    TimeoutError: if another process did not answer.
  """
  parts, outcome = None, ("", "")
  try:
    parts = _read(folder, like, metrics, foreign)
  except OtherState as error:
    outcome = ("other", str(error))
  except Damaged as error:
    outcome = ("damaged", str(error))
  except Exception as error:  # the other processes must know of every error
    outcome = ("damaged", reason(error))
  outcomes = [json.loads(text) for text in everyone(json.dumps(outcome), timeout_s)]
  kind, text = next((outcome for outcome in outcomes if outcome[0]), ("", ""))
  if parts is None or kind:
    raise (OtherState if kind == "other" else Damaged)(text)
  examined = examine(parts.state)
  # A PRNG key whose description is lost comes back as numbers with the same bits.
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
  """Reads the parts in this process. Does not compare checksums of arrays, which needs all processes."""
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
    # The manager's barriers would wait for a process that found damage and left.
    state = ocp.StandardCheckpointHandler().restore(folder / "state", args=ocp.args.StandardRestore(like))
  except Exception as error:  # every layer that reads may fail on damage
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
