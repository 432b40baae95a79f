"""`Data`: training batches without end, evaluation batches, and what they look like."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import grain
import numpy as np

from mpjax.train._config import DataConfig
from mpjax.train._errors import DataError

Batch = dict[str, np.ndarray]
# Positions in a batch.
Rows = slice | np.ndarray

_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class DataInfo:
  """Facts about a dataset: its kind, sizes and fingerprint.

  Attributes:
    kind: `"tokens"` or `"images"`.
    vocab_size: number of tokens, or `None`.
    seq_len: tokens that a model sees of a row, or `None`.
    image_shape: (height, width, channels), or `None`.
    num_classes: number of labels, or `None`.
    train_examples: rows of an epoch.
    eval_examples: rows held out.
    fingerprint: changes with the content, the split and the row length; not with where the data lies.
    description: one line for a person.
  """

  kind: str
  vocab_size: int | None
  seq_len: int | None
  image_shape: tuple[int, int, int] | None
  num_classes: int | None
  train_examples: int
  eval_examples: int
  fingerprint: str
  description: str


@dataclasses.dataclass(frozen=True)
class Data:
  """A dataset, split and ready to be batched.

  Attributes:
    info: what it looks like.
    train_row: index -> one row of the training split.
    eval_row: index -> one row of the evaluation split.
    batch_size: rows of a batch.
    eval_batches: batches of an evaluation at most; `None`: all.
    seed: of the order of training rows.
    workers: threads that read ahead; 0 reads when asked.
  """

  info: DataInfo
  train_row: Callable[[int], Batch]
  eval_row: Callable[[int], Batch]
  batch_size: int
  eval_batches: int | None
  seed: int
  workers: int

  def train(self, rows: Rows = _ALL) -> grain.DatasetIterator:
    """Yields batches without end, each epoch in another order; drops the rows that do not fill a batch.

    The iterator's `get_state()` is a JSON-serialisable dict; `set_state` continues with the very next batch.
    Neither it nor the order of rows depends on `rows`: indices are shuffled and batched, and then read.

    Args:
      rows: which rows of each batch to read; those of a process in a run of several.
    """
    batches = grain.MapDataset.range(self.info.train_examples).seed(self.seed).shuffle()
    batches = batches.batch(self.batch_size, drop_remainder=True).repeat()
    # The buffer is read-ahead alone; with one thread and no buffer the order is the same.
    options = grain.ReadOptions(num_threads=self.workers, prefetch_buffer_size=2 * self.workers)
    read = functools.partial(_read, self.train_row)
    return iter(batches.map(lambda batch: read(batch[rows])).to_iter_dataset(options))

  def eval(self, rows: Rows = _ALL) -> Iterator[Batch]:
    """Yields the same whole batches at every call; of each, `rows`."""
    for i in range(self.num_eval_batches):
      yield _read(self.eval_row, np.arange(i * self.batch_size, (i + 1) * self.batch_size)[rows])

  @property
  def num_eval_batches(self) -> int:
    """Returns the number of batches of an evaluation."""
    whole = self.info.eval_examples // self.batch_size
    return whole if self.eval_batches is None else min(whole, self.eval_batches)


def data_mismatch(first: str, other: str, process: int) -> str | None:
  """Returns what is wrong if process 0's data and another's have these fingerprints; `None` for nothing."""
  if first == other:
    return None
  return f"process {process} reads other data than process 0: give all of them the same files"


def describe(error: Exception) -> str:
  """Returns what kept rows from being read, on one line; for the operating system's, file and reason."""
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return " ".join(f"{type(error).__name__}: {error}".split())


def _read(row: Callable[[int], Batch], indices: np.ndarray) -> Batch:
  read = [row(int(index)) for index in indices]
  return {name: np.stack([each[name] for each in read]) for name in read[0]}


def make_data(
  info: DataInfo,
  train_row: Callable[[int], Batch],
  eval_row: Callable[[int], Batch],
  spec: DataConfig,
  seed: int,
) -> Data:
  """Returns a `Data`, when both splits fill a batch.

  Raises:
    DataError: if one does not.
  """
  for split, examples in (("training", info.train_examples), ("evaluation", info.eval_examples)):
    if examples < spec.batch_size:
      raise DataError(
        f"data.batch_size={spec.batch_size}: the {split} split has {examples} rows only; use a smaller batch"
      )
  return Data(info, train_row, eval_row, spec.batch_size, spec.eval_batches, seed, spec.workers)
