"""Hugging Face datasets, if the `datasets` package is installed: text, tokens, or images with labels."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

import numpy as np

from mpjax.registry._checks import Positive
from mpjax.registry._errors import DataError
from mpjax.registry._registry import register_data
from mpjax.zoo.data._images import (
  Classes,
  check_labels,
  check_pair,
  images_to_rows,
  require_classes,
  split_positions,
)
from mpjax.zoo.data._text import Loaded, Share, documents_to_rows, streams_to_rows

# Images that are read before a run, for their mean and deviation and for the fingerprint.
_SAMPLED = 1024


@register_data("huggingface")
def load_huggingface(
  *,
  path: str | None = None,
  name: str | None = None,
  text_column: str | None = None,
  token_column: str | None = None,
  vocab_size: Positive | None = None,
  image_column: str | None = None,
  label_column: str | None = None,
  num_classes: Classes | None = None,
  train_split: str = "train",
  eval_split: str | None = None,
  seq_len: Positive = 128,
  packed: bool = True,
  valid_fraction: Share = 0.05,
) -> Loaded:
  """Loads a dataset saved at `path`, or `name` from the hub: text as bytes, tokens, or images with labels.

  Uses `path` if it is a folder, else `name`. Tokens are lists of numbers below `vocab_size`. Lists or texts
  are concatenated into a stream; with `packed: false` each row comes from one of them, is padded, and has a
  `mask`. Without `eval_split`, the share `valid_fraction` of the training split is held out.
  """
  # Releases before 4 may run a dataset's own script: only if the user's environment allows it.
  os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
  try:
    datasets = importlib.import_module("datasets")
  except ImportError:
    raise DataError("data.kind=huggingface needs the datasets package: pip install datasets") from None
  saved = path is not None and pathlib.Path(path).is_dir()
  source = path if saved else name
  if not source:
    missing = f"data.path={path!r}: no such folder" if path else "data.kind=huggingface"
    raise DataError(f"{missing}: expected data.path (a saved dataset) or data.name (of the hub)")
  try:
    splits = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
  except Exception as error:  # missing files, failed connections and others
    raise DataError(f"cannot load dataset {source!r}: {' '.join(str(error).split())}") from error
  if not isinstance(splits, dict):
    splits = {train_split: splits}
  if eval_split == train_split:
    raise DataError(f"data.eval_split={eval_split!r} is the training split: expected another split, or null")
  wanted = [train_split] + ([eval_split] if eval_split else [])
  for split in wanted:
    if split not in splits:
      raise DataError(f"dataset {source!r}: no split {split!r}; there are {', '.join(splits)}")
  if token_column:
    if vocab_size is None:
      raise DataError(
        "data.vocab_size: missing; data.token_column needs the number of the tokenizer's tokens"
      )
    found = [_tokens(splits[split], token_column, f"{source}[{split}]", vocab_size) for split in wanted]
    streams, lengths = ([part[i] for part in found] for i in (0, 1))
    if len(found) == 1 and packed:
      cut = len(streams[0]) - round(len(streams[0]) * valid_fraction)
      streams = [streams[0][:cut], streams[0][cut:]]
    elif len(found) == 1:
      count = len(lengths[0]) - max(1, round(len(lengths[0]) * valid_fraction))
      cut = int(lengths[0][:count].sum())
      streams, lengths = [streams[0][:cut], streams[0][cut:]], [lengths[0][:count], lengths[0][count:]]
    facts = {"vocab_size": vocab_size}
    return streams_to_rows(streams, source, "tokens", seq_len, facts, None if packed else lengths)
  if text_column:
    documents = {}
    for split in wanted:
      for i, text in enumerate(_column(splits[split], text_column)):
        if not isinstance(text, str):
          raise DataError(
            f"{source}[{split}]: {text_column}[{i}] is {type(text).__name__}: expected a string"
          )
        documents[f"{split}/{i}"] = text.encode()
    prefix = f"{eval_split}/" if eval_split else None
    return documents_to_rows(documents, source, seq_len, valid_fraction, prefix, packed=packed)
  if not (image_column and label_column):
    raise DataError(
      "data.kind=huggingface: expected data.text_column, data.token_column (of lists of numbers), or "
      "data.image_column and data.label_column"
    )
  columns = [ImageColumn(splits[split], image_column, f"{source}[{split}]") for split in wanted]
  labels = [np.asarray(_column(splits[split], label_column)) for split in wanted]
  for column, of_column in zip(columns, labels, strict=True):
    check_labels(of_column, label_column, column.title)
    require_classes(of_column, label_column, column.title, num_classes, sum(map(len, labels)))
    check_pair({"images": column.sample(), "labels": of_column[column.sampled]}, "", column.title)
  if len(wanted) == 2:
    (train, held_out), (train_labels, eval_labels) = columns, labels
  else:
    first, second = split_positions(len(columns[0]), valid_fraction)
    train, held_out = columns[0].part(first), columns[0].part(second)
    train_labels, eval_labels = labels[0][first], labels[0][second]
  return images_to_rows(
    (train, train_labels), (held_out, eval_labels), train.sample(), held_out.sample(), source, num_classes
  )


def _tokens(split: Any, name: str, title: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the concatenated lists of a column, in 16 bits if they suffice, and the length of each list."""
  _require_column(split, name)
  length_of = importlib.import_module("pyarrow.compute").list_value_length
  dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
  parts, lengths = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
  for table in split.select_columns([name]).with_format("arrow").iter(batch_size=1000):
    for chunk in table.column(name).chunks:
      if not hasattr(chunk, "flatten") or chunk.null_count or (inside := chunk.flatten()).null_count:
        raise DataError(f"{title}: {name} is {chunk.type} or has gaps: expected lists of integers")
      numbers = inside.to_numpy(zero_copy_only=False)
      if not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(f"{title}: {name} is {chunk.type}: expected lists of integers")
      wrong = numbers[(numbers < 0) | (numbers >= vocab_size)]
      if len(wrong):
        raise DataError(
          f"{title}: {name} has {wrong[0]}: expected 0 or more, and below data.vocab_size={vocab_size}"
        )
      parts.append(numbers.astype(dtype))
      lengths.append(length_of(chunk).to_numpy(zero_copy_only=False).astype(np.int64))
  return np.concatenate(parts), np.concatenate(lengths)


class ImageColumn:
  """A column of images of one shape, which are decoded when they are read."""

  def __init__(self, split: Any, name: str, title: str, positions: np.ndarray | None = None):
    _require_column(split, name)
    self.title = title
    self._split, self._name = split, name
    self._positions = np.arange(len(split)) if positions is None else positions
    if not len(self._positions):
      raise DataError(f"{title}: {name} has no rows")
    self._shape = self._read(0).shape

  def part(self, positions: np.ndarray) -> ImageColumn:
    """Returns some of the images."""
    return ImageColumn(self._split, self._name, self.title, self._positions[positions])

  @property
  def sampled(self) -> np.ndarray:
    """Returns the positions of the images that are read before a run."""
    return np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int))

  def sample(self) -> np.ndarray:
    """Returns the images that are read before a run."""
    return np.stack([self[int(index)] for index in self.sampled])

  def __len__(self) -> int:
    return len(self._positions)

  def __getitem__(self, index: int) -> np.ndarray:
    image = self._read(index)
    if image.shape != self._shape:
      raise DataError(
        f"{self.title}: {self._name}[{self._positions[index]}] has shape {image.shape}, the first "
        f"{self._shape}: expected one shape"
      )
    return image

  def _read(self, index: int) -> np.ndarray:
    return np.asarray(self._split[int(self._positions[index])][self._name])


def _require_column(split: Any, name: str) -> None:
  if name not in split.column_names:
    raise DataError(f"dataset: no column {name!r}; there are {', '.join(split.column_names)}")


def _column(split: Any, name: str) -> list[Any]:
  _require_column(split, name)
  return list(split[name])
