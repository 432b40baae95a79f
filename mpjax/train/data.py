"""Rows of a dataset as batches, shuffled, batched and read by grain, and facts about them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from mpjax._types import ArrayLike
from mpjax.registry import DATASETS, DataInfo
from mpjax.sharding import Rows
from mpjax.train._errors import DataError, described
from mpjax.train.config._config import DataConfig

if TYPE_CHECKING:
  import grain

Batch = dict[str, np.ndarray]

_ALL = slice(None)
# Rows in the fingerprint of a dataset whose function gives none.
_SAMPLED = 32


class RowSource(Protocol):
  """Rows by position."""

  def __len__(self) -> int:
    """Returns the number of rows."""

  def __getitem__(self, index: int, /) -> Mapping[str, ArrayLike]:
    """Returns the arrays of one row by name; the same at every call."""


@dataclasses.dataclass(frozen=True)
class Data:
  """A dataset, split and ready to be batched as `spec` says; `seed` is that of the order of training rows."""

  info: DataInfo
  train_rows: RowSource
  eval_rows: RowSource
  spec: DataConfig
  seed: int

  def train(self, rows: Rows = _ALL) -> grain.DatasetIterator:
    """Yields `rows` of each batch without end, in another order each epoch; drops rows that fill no batch.

    The iterator's `get_state()` is a JSON-serialisable dict; `set_state` continues with the next batch.
    Neither the state nor the order depends on `rows`: indices are shuffled and batched before rows are read.
    """
    import grain  # with orbax; tools that only look at rows need neither

    batches = grain.MapDataset.range(self.info.train_examples).seed(self.seed).shuffle()
    batches = batches.batch(self.spec.batch_size, drop_remainder=True).repeat()
    # The buffer only reads ahead; the order is the same without it.
    workers = self.spec.workers
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    read = functools.partial(_read, self.train_rows)
    return iter(batches.map(lambda batch: read(batch[rows])).to_iter_dataset(options))

  def eval(self, rows: Rows = _ALL) -> Iterator[Batch]:
    """Yields `rows` of each evaluation batch. The batches are whole, and the same at every call."""
    size, most = self.spec.batch_size, self.spec.eval_batches
    whole = self.info.eval_examples // size
    for i in range(whole if most is None else min(whole, most)):
      yield _read(self.eval_rows, np.arange(i * size, (i + 1) * size)[rows])


def load_data(spec: DataConfig, *, seed: int) -> Data:
  """Loads the dataset of a config's `data` section; `seed` decides the order of training batches alone.

  Raises:
    DataError: if data is missing or cannot be used, or does not fill a batch; one line.
  """
  title = f"data.kind={spec.kind}"
  try:
    made: Any = DATASETS.find(spec.kind).fun(**spec.options)
  except DataError:
    raise
  except (OSError, ValueError) as error:  # from a user's function
    raise DataError(f"{title}: {described(error)}") from error
  if not isinstance(made, tuple) or len(made) not in (2, 3):
    raise DataError(
      f"{title}: its function returned a {type(made).__name__}: expected (train_rows, eval_rows) or "
      "(train_rows, eval_rows, info)"
    )
  train, held_out, facts = (*made, {})[:3]
  rows = {f"{title}: the training rows": train, f"{title}: the evaluation rows": held_out}
  for where, split in rows.items():
    # A dict of whole arrays has no rows: `_row` says so.
    if hasattr(split, "__len__") and not isinstance(split, Mapping) and len(split) < spec.batch_size:
      few = f"data.batch_size={spec.batch_size}: {where} are {len(split)} only"
      raise DataError(f"{few}; use a smaller batch")
  row, other = (_layout(_row(split, 0, where)) for where, split in rows.items())
  if row != other:
    raise DataError(f"{title}: evaluation rows hold {other}, training rows {row}: expected the same")
  known = _facts(facts, title)
  info = DataInfo(
    train_examples=len(train),
    eval_examples=len(held_out),
    fingerprint=known.pop("fingerprint", None) or _fingerprint(rows),
    description=known.pop("description", None)
    or f"{spec.kind}: {len(train):,} rows to train on, {len(held_out):,} held out",
    row=row,
    facts=known,
  )
  return Data(info, train, held_out, spec, seed)


def _read(rows: RowSource, indices: np.ndarray) -> Batch:
  read = [rows[int(index)] for index in indices]
  try:
    return {name: _stack([np.asarray(each[name]) for each in read]) for name in read[0]}
  except (KeyError, ValueError) as error:  # a row lacks a name, or has another shape
    layouts = [{name: np.shape(value) for name, value in row.items()} for row in read]
    usual = max(layouts, key=layouts.count)
    other = next((at for at, layout in enumerate(layouts) if layout != usual), None)
    if other is None:
      raise
    raise DataError(
      f"row {indices[other]} holds {layouts[other]}, others {usual}: expected rows that are alike"
    ) from error


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
  """Stacks arrays in JAX's dtypes: float32 and int32 for NumPy's float64 and int64."""
  stacked = np.stack(arrays)
  return stacked.astype(jax.dtypes.canonicalize_dtype(stacked.dtype), copy=False)


def _row(rows: RowSource, index: int, where: str) -> Batch:
  """Reads and checks a row; `where` says for a person which rows these are."""
  try:
    row = {str(name): np.asarray(value) for name, value in rows[index].items()}
    kinds = {name: array.dtype for name, array in row.items()}
    # V: bfloat16 and FP8.
    if not len(rows) or not row or any(kind.kind not in "biufcV" or kind.names for kind in kinds.values()):
      raise TypeError(f"it holds {kinds}")
  except Exception as error:  # a user's data source can raise anything
    raise DataError(
      f"{where} cannot be used: row {index}: {described(error)}: expected len(rows), and rows[i], a dict of "
      "arrays of numbers by name"
    ) from error
  return row


def _layout(row: Batch) -> dict[str, tuple[str, tuple[int, ...]]]:
  """Returns the dtype in a batch, and the shape, of each array of a row."""
  stacked = {name: _stack([value]) for name, value in row.items()}
  return {name: (value.dtype.name, value.shape[1:]) for name, value in stacked.items()}


def _facts(facts: object, title: str) -> dict[str, Any]:
  """Returns a data function's facts as plain data, for an export."""
  try:
    named = dict(facts) if isinstance(facts, Mapping) else vars(facts)
    plain: dict[str, Any] = json.loads(json.dumps(named, default=lambda array: array.tolist()))
  except (TypeError, ValueError, AttributeError) as error:
    raise DataError(
      f"{title}: info={facts!r}: expected numbers, text, lists and mappings by name, such as "
      '{"num_classes": 10}'
    ) from error
  return {name: value for name, value in plain.items() if value is not None}


def _fingerprint(rows: Mapping[str, RowSource]) -> str:
  """Returns a digest of the lengths and some rows of both splits."""
  lengths = tuple(len(split) for split in rows.values())
  digest = hashlib.blake2b(repr(lengths).encode(), digest_size=8)
  for where, split in rows.items():
    for index in np.unique(np.linspace(0, len(split) - 1, _SAMPLED).astype(int)):
      row = _bytes(_row(split, int(index), where))
      if index == 0 and row != _bytes(_row(split, 0, where)):
        raise DataError(
          f"{where}: row 0 is not the same twice, and a run could not resume exactly: make rows depend on "
          "the index alone, as with np.random.default_rng(index)"
        )
      digest.update(row)
  return digest.hexdigest()


def _bytes(row: Batch) -> bytes:
  head = repr([(name, array.dtype.name, array.shape) for name, array in row.items()])
  return head.encode() + b"".join(array.tobytes() for array in row.values())
