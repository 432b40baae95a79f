"""What orbax lacks, so that a checkpoint is bit for bit what this run saved at this step, or is told apart.

orbax 0.12.8 writes checkpoints, in the background and atomically. It reads arrays with a flipped bit, PRNG keys
as numbers if their description is lost, and JSON of other contents. These rows of the fault table need this:

- `sealed`, `read`, `compare`: files of a checkpoint damaged or exchanged, another step's, run's or model's.
- `writer`: a full disk, which ends tensorstore's transactions one by one with a traceback each; a process
  that is killed or paused, for which only barriers of named processes have a time-out.
- `write_a_little`: a full disk, on which orbax drops writes that it has begun.
- `reason`: all of these end in one line, and orbax documents no errors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from mpjax.train.checkpoints._checksums import Examined, NonFiniteLeaves, kinds

# The operating system's errors for files that cannot be written or read.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
DAMAGED, NOT_FINITE, OTHER_STATE = "is damaged", "is not finite", "is of another state"
_NOT_SAVED = "not what was saved"

# Fields that must be finite. Counters and keys are integers, and FP8 histories forget NaN.
_FINITE_FIELDS = ("params", "model_state", "opt_state")
# More bytes than orbax writes in addition to the arrays.
_A_LITTLE = 2**20


class Unusable(Exception):
  """A checkpoint cannot be used: it is `DAMAGED`, `NOT_FINITE` or of an `OTHER_STATE`, and why."""

  def __init__(self, what: str, why: str):
    super().__init__(why)
    self.what = what


def writer(timeout_s: int) -> ocp.AsyncCheckpointer:
  """Returns what writes checkpoints of two parts: `state`, arrays, and `record`, a JSON object."""
  named = set(range(jax.process_count())) if jax.process_count() > 1 else None
  processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=named)
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
    state=ocp.StandardCheckpointHandler(save_concurrent_gb=None, multiprocessing_options=processes),
    record=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
  )
  options = ocp.AsyncOptions(timeout_secs=timeout_s)
  return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=processes)


def sealed(**record: Any) -> dict[str, Any]:
  """Returns a copy of a record, as JSON will give it back, with its checksum."""
  copy = json.loads(json.dumps(record))
  return copy | {"checksum": _digest(copy)}


def read_record(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the record of a checkpoint, without its checksum.

  Raises:
    Unusable: if it is missing or not what was saved.
  """
  try:
    record: dict[str, Any] = ocp.JsonCheckpointHandler().restore(folder / "record")
    is_whole = record.pop("checksum") == _digest(record)
  except Exception as error:  # from files or contents of any kind
    raise Unusable(DAMAGED, f"record: {reason(error)}") from error
  if not is_whole:
    raise Unusable(DAMAGED, f"record: {_NOT_SAVED}")
  return record


def read(
  folder: pathlib.Path, like: dict[str, Any], foreign: Callable[[dict[str, Any]], str | None]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the record and the state of a checkpoint; `compare` has to follow.

  Args:
    folder: the checkpoint.
    like: abstract arrays with the structure, dtypes and shardings to restore the state with.
    foreign: takes the record; returns why it does not belong here, or `None` if it does.

  Raises:
    Unusable: if it cannot be read, or belongs elsewhere.
  """
  record = read_record(folder)
  if (problem := foreign(record)) is not None:
    raise Unusable(DAMAGED, problem)
  there, here = {path: text.split()[0] for path, text in record["leaves"].items()}, kinds(like)
  if differ := sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path)):
    saved, now = (found.get(differ[0], "not there") for found in (there, here))
    raise Unusable(OTHER_STATE, f"{differ[0]} is {saved} in the checkpoint and {now} in this run")
  try:
    # A checkpointer's barriers would wait for a process that found damage and left.
    state = ocp.StandardCheckpointHandler().restore(folder / "state", args=ocp.args.StandardRestore(like))
  except Exception as error:  # every layer that reads may fail on damage
    raise Unusable(DAMAGED, f"state: {reason(error)}") from error
  return record, state


def compare(record: Mapping[str, Any], found: Examined) -> None:
  """Raises `Unusable` if a state that was read is not the one of its record, or is not finite."""
  # A PRNG key whose description is lost comes back as numbers with the same bits.
  if differ := [path for path, leaf in record["leaves"].items() if found.leaves.get(path) != leaf]:
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    raise Unusable(DAMAGED, f"state/{differ[0]}{more}: {_NOT_SAVED}")
  if held := nonfinite(found, record["begun_with"]):
    raise Unusable(NOT_FINITE, nonfinite_text(held))


def nonfinite(examined: Examined, begun_with: NonFiniteLeaves) -> NonFiniteLeaves:
  """Returns the leaves of an examined state that hold NaN or infinity and did not when the run began.

  Some leaves may start with infinity: the best loss so far (`optax.contrib.reduce_on_plateau`), a mask.
  """
  fields = {path: x for path, x in examined.nonfinite.items() if path.split("/")[0] in _FINITE_FIELDS}
  new = {path: [x for x in held if x not in begun_with.get(path, ())] for path, held in fields.items()}
  return {path: held for path, held in new.items() if held}


def nonfinite_text(nonfinite: NonFiniteLeaves) -> str:
  """Describes the first three leaves that are not finite, and says how many more there are."""
  shown = [f"{path} holds {' and '.join(held)}" for path, held in list(nonfinite.items())[:3]]
  return ", ".join(shown) + (f", and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else "")


def write_a_little(directory: pathlib.Path) -> None:
  """Raises `OSError` if a directory cannot be written."""
  with tempfile.TemporaryFile(dir=directory) as file:
    file.write(bytes(_A_LITTLE))
    file.flush()
    os.fsync(file.fileno())


def reason(error: BaseException) -> str:
  """Returns one line on what went wrong: the operating system's words if it caused the error."""
  chain = [error]
  while (link := chain[-1].__cause__ or chain[-1].__context__) is not None and link not in chain:
    chain.append(link)
  told = " ".join(map(str, chain))
  if known := [text for text in map(os.strerror, STORAGE_ERRORS) if text in told]:
    return known[0]
  if "DEADLINE_EXCEEDED" in told:
    return "another process did not do its part in time"
  text = " ".join(str(error).split()).partition(" [tensorstore_spec")[0]
  text = text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
  return text if len(text) <= 300 else f"{text[:300]}..."


def _digest(record: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
