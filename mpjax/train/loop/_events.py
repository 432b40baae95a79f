"""Writes TensorBoard's file of a run, without a thread or a queue."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
  """Writes scalars and histograms of a run. Raises `OSError` if the disk cannot be written.

  Any other error ends the writing, and not the run.

  Attributes:
    problem: the error that ended the writing; `None` before one.

  Args:
    folder: the folder of event files; made if missing.
    start: the step of the checkpoint that the run resumes from; events of later steps are dropped.
    owner: whether this process writes; if not, all methods do nothing.
  """

  def __init__(self, folder: pathlib.Path, start: int, owner: bool = True):
    self._writer: RecordWriter | None = None
    self.problem: str | None = None
    if not owner:
      return
    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{time.time_ns()}"
    self._writer = RecordWriter((folder / name).open("xb"))
    self._write(Event(file_version="brain.Event:2"))
    # TensorBoard drops earlier files' events of this step and later ones.
    self._write(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))
    self.flush()

  def add_scalar(self, tag: str, value: float, step: int) -> None:
    """Writes one number."""
    self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))

  def add_histogram(
    self, tag: str, limits: Sequence[float], counts: Sequence[float], total: float, squares: float, step: int
  ) -> None:
    """Writes a histogram.

    Args:
      tag: its name.
      limits: upper limits of the buckets; the first and the last bucket are empty.
      counts: values in each bucket.
      total: the sum of the values.
      squares: the sum of their squares.
      step: the run's step.
    """
    histogram = HistogramProto(
      min=limits[0],
      max=limits[-2],
      num=sum(counts),
      sum=total,
      sum_squares=squares,
      bucket_limit=limits,
      bucket=counts,
    )
    self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, histo=histogram)])))

  def flush(self) -> None:
    """Passes the written events to the operating system."""
    self._guarded(lambda writer: writer.flush())

  def close(self) -> None:
    """Flushes and closes the file; closes it also if flushing raises."""
    self._guarded(lambda writer: writer.close())

  def _write(self, event: Event) -> None:
    event.wall_time = time.time()
    self._guarded(lambda writer: writer.write(event.SerializeToString()))

  def _guarded(self, action: Callable[[Any], None]) -> None:
    if self._writer is None:
      return
    try:
      action(self._writer)
    except OSError:
      raise
    except Exception as error:  # TensorBoard's code can raise anything, and the run must go on
      self.problem = " ".join(f"{type(error).__name__}: {error}".split())
      with contextlib.suppress(Exception):  # as above
        self._writer.close()
      self._writer = None
