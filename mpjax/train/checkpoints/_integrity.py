"""What orbax lacks, so that a checkpoint is bit for bit what this run saved at this step, or is told apart.

orbax 0.12.8 writes in the background and atomically. It reads arrays with a flipped bit, PRNG keys whose
description is lost, as numbers, and JSON of other contents. These rows of the fault table need this:

- `write`, `read_record`, `read_state`, `difference`: each file of a checkpoint damaged or exchanged; a
  checkpoint of another step, run or model.
- `writer`: a full disk, which ends tensorstore's transactions one by one with a traceback each; a process
  that is killed or paused, for which only barriers of named processes have a time-out.
- `_write_a_little`: a full disk, on which orbax drops writes that it has begun.
- `reason`, `quiet`: all of these end in one line, and orbax documents no errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from mpjax._types import PyTree
from mpjax.sharding._checksums import Examined, NonFiniteLeaves, kinds
from mpjax.train._errors import CheckpointError, causes, one_line

# The operating system's errors for files that cannot be written or read.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)

# Fields that must be finite. Counters and keys are integers, and FP8 histories forget NaN.
_FINITE_FIELDS = ("params", "model_state", "opt_state")
# More bytes than orbax writes in addition to the arrays.
_A_LITTLE = 2**20


class Damaged(CheckpointError):
  """A checkpoint is not what was saved, or not finite: an older one may be good."""


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


def write(writer: ocp.AsyncCheckpointer, folder: pathlib.Path, state: PyTree, record: dict[str, Any]) -> None:
  """Starts writing a checkpoint, of which it takes a copy. Raises anything if it cannot be written."""
  copy = json.loads(json.dumps(record))
  copy["checksum"] = _digest(copy)
  _write_a_little(folder.parent)
  parts = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(copy))
  writer.save(folder, args=parts, force=True)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the record of a checkpoint, without its checksum.

  Raises:
    Damaged: if it is missing or not what was saved.
  """
  try:
    record: dict[str, Any] = ocp.JsonCheckpointHandler().restore(folder / "record")
    is_whole = record.pop("checksum") == _digest(record)
  except Exception as error:  # from files or contents of any kind
    raise Damaged(f"is damaged: record: {reason(error)}") from error
  if not is_whole:
    raise Damaged("is damaged: record: not what was saved")
  return record


def read_state(folder: pathlib.Path, like: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the state of a checkpoint, like abstract arrays. `difference` has to follow, in all processes.

  Raises:
    Damaged: if it cannot be read.
    CheckpointError: if it has other leaves, dtypes or shapes.
  """
  there, here = {path: text.split()[0] for path, text in record["leaves"].items()}, kinds(like)
  if differ := sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path)):
    saved, now = (found.get(differ[0], "not there") for found in (there, here))
    raise CheckpointError(
      f"is of another state: {differ[0]} is {saved} in the checkpoint and {now} in this run; nothing was "
      "changed: restore it with the model, policy and optimizer that it was saved with"
    )
  try:
    # A checkpointer's barriers would wait for a process that found damage and left.
    return ocp.StandardCheckpointHandler().restore(folder / "state", args=ocp.args.StandardRestore(like))
  except Exception as error:  # every layer that reads may fail on damage
    raise Damaged(f"is damaged: state: {reason(error)}") from error


def difference(record: Mapping[str, Any], found: Examined) -> str:
  """Returns how a state that was read is not the one of its record, or not finite; empty if it is both."""
  # A PRNG key whose description is lost comes back as numbers with the same bits.
  if differ := [path for path, leaf in record["leaves"].items() if found.leaves.get(path) != leaf]:
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"is damaged: state/{differ[0]}{more}: not what was saved"
  held = nonfinite(found, record["begun_with"])
  return f"is not finite: {nonfinite_text(held)}" if held else ""


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Hides what Python says of reads and writes that orbax gave up when another failed: a traceback each.

  Waits for an orbax that waits for all that it began. Nothing that a user's code raises is hidden.
  """
  report = sys.unraisablehook
  sys.unraisablehook = lambda dropped: None if _is_given_up(dropped) else report(dropped)
  try:
    yield
  finally:
    sys.unraisablehook = report


def _is_given_up(dropped: sys.UnraisableHookArgs) -> bool:
  of = dropped.object
  if inspect.iscoroutine(of):
    return os.path.join("orbax", "checkpoint", "") in of.cr_code.co_filename
  # A call by tensorstore, after asyncio's loop is closed, has no Python object.
  return of is None and str(dropped.exc_value) == "Event loop is closed"


def _write_a_little(directory: pathlib.Path) -> None:
  """Raises `OSError` if a directory cannot be written."""
  with tempfile.TemporaryFile(dir=directory) as file:
    file.write(bytes(_A_LITTLE))
    file.flush()
    os.fsync(file.fileno())


def reason(error: BaseException) -> str:
  """Returns one line on what went wrong: the operating system's words if it caused the error."""
  told = " ".join(map(str, causes(error)))
  if known := [text for text in map(os.strerror, STORAGE_ERRORS) if text in told]:
    return known[0]
  if "DEADLINE_EXCEEDED" in told:
    return "another process did not do its part in time"
  text = str(error).partition(" [tensorstore_spec")[0]
  return one_line(
    text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
  )


def _digest(record: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
