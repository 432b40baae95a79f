"""`metrics.jsonl`: the records of a run, through kills, damage and lost files."""

from __future__ import annotations

import json
import os
import pathlib
from typing import IO, Any

import numpy as np

from mpjax._types import ArrayLike
from mpjax.train._files import set_aside, write_atomically
from mpjax.train.loop._output import LOGGER


class MetricsFile:
  """`metrics.jsonl`: one JSON object per line, in the order of steps.

  Records of steps after `resume_step`, and a line that a kill cut off, are dropped, because the resumed run
  writes them again. The first record of every other step is kept. If the file has other lines, a copy of it
  is kept in `damaged/` in the same folder.

  Attributes:
    count: number of records in it.

  Args:
    path: the file.
    resume_step: the step of the checkpoint that the run resumes from.
    expected: number of records when that checkpoint was saved; `None` if unknown.
    owner: whether this process writes; if not, all methods do nothing.
  """

  def __init__(self, path: pathlib.Path, resume_step: int, expected: int | None = None, owner: bool = True):
    self._file: IO[str] | None = None
    self.count = 0
    if not owner:
      return
    content = path.read_bytes() if path.exists() else b""
    records, wrong = _read(content, resume_step)
    if wrong:
      copy = set_aside(path, keep=True)
      lines = ", ".join(map(str, wrong[:3])) + (", ..." if len(wrong) > 3 else "")
      kept = f"all others are kept, and the file as it was is {copy}"
      LOGGER.info(f"{path.name}: not a record of a new step: line {lines}; {kept}")
    self.count = len(records)
    if expected is not None and self.count < expected:
      last = f"; the last is of step {max(records)}" if records else ""
      missing = f"{expected - self.count} of {expected} records up to step {resume_step} are missing"
      LOGGER.info(f"{path.name}: {missing}{last}")
    write_atomically(path, b"".join(records.values()))
    self._file = path.open("a", buffering=1, encoding="utf-8")

  def write(self, record: dict[str, Any]) -> None:
    """Appends a record, and passes the line to the operating system before it returns."""
    if self._file is not None:
      self._file.write(json.dumps(record) + "\n")
      self.count += 1

  def sync(self) -> None:
    """Waits until all records are on the disk."""
    if self._file is not None:
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._file.close()


def plain(value: ArrayLike) -> Any:
  """Returns a JSON value for an array scalar, exact for float32; non-finite floats become strings."""
  item = np.asarray(value).item()
  if isinstance(item, float) and not np.isfinite(item):
    return str(item)  # "nan", "inf", "-inf": JSON has no such numbers
  return item


def _read(content: bytes, resume_step: int) -> tuple[dict[int, bytes], list[int]]:
  """Returns the lines to keep, by step, and the numbers of lines that are not records or repeat a step."""
  *lines, cut = content.split(b"\n")
  records: dict[int, bytes] = {}
  wrong = []
  for number, line in enumerate([*lines, cut], 1):
    step = _step(line)
    if step is None or step in records:
      wrong.append(number)
    elif step <= resume_step:
      records[step] = line + b"\n"
  return records, [number for number in wrong if number <= len(lines)]  # a kill may have cut the last


def _step(line: bytes) -> int | None:
  """Returns the step of a record; `None` for a line that is not a record."""
  try:
    step = json.loads(line)["step"]
  except (ValueError, KeyError, TypeError, IndexError, RecursionError):
    return None
  return step if isinstance(step, int) and not isinstance(step, bool) else None
