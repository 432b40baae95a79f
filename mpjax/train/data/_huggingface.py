"""A Hugging Face dataset, where the `datasets` package is installed: text, or images with labels."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

import numpy as np

from mpjax.train._errors import DataError
from mpjax.train._kinds import register_data
from mpjax.train._sections import Positive
from mpjax.train.data._images import arrays_to_rows, check_pair, split_arrays
from mpjax.train.data._text import Loaded, Share, documents_to_rows


@register_data("huggingface")
def load_huggingface(
  *,
  path: str | None = None,
  name: str | None = None,
  text_column: str | None = None,
  image_column: str | None = None,
  label_column: str | None = None,
  train_split: str = "train",
  eval_split: str | None = None,
  seq_len: Positive = 128,
  valid_fraction: Share = 0.05,
) -> Loaded:
  """Loads a dataset saved at `path`, or of the hub by `name`: text as bytes, or images with labels.

  `path` wins where it is a folder, else `name`. Without `eval_split` a `valid_fraction` of the training
  split is held out.
  """
  # Releases before 4 may run a dataset's own script: not unless the user's environment says so.
  os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
  try:
    datasets = importlib.import_module("datasets")
  except ImportError:
    raise DataError("data.kind=huggingface needs the datasets package: pip install datasets") from None
  saved = path is not None and pathlib.Path(path).is_dir()
  source = path if saved else name or path
  if not source:
    raise DataError("data.kind=huggingface: expected data.path (a saved dataset) or data.name (of the hub)")
  try:
    splits = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
  except Exception as error:  # the package raises many kinds, from missing files to failed connections
    raise DataError(f"cannot load dataset {source!r}: {' '.join(str(error).split())}") from error
  if not isinstance(splits, dict):
    splits = {train_split: splits}
  if eval_split == train_split:
    raise DataError(f"data.eval_split={eval_split!r} is the training split: expected another, or none")
  wanted = [train_split] + ([eval_split] if eval_split else [])
  for split in wanted:
    if split not in splits:
      raise DataError(f"dataset {source!r}: no split {split!r}; there are {', '.join(splits)}")
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
    return documents_to_rows(documents, source, seq_len, valid_fraction, prefix)
  if not (image_column and label_column):
    raise DataError(
      "data.kind=huggingface: expected data.text_column, or data.image_column and data.label_column"
    )
  pairs = []
  for split in wanted:
    images = _stack(_column(splits[split], image_column), f"{source}[{split}]: {image_column}")
    labels = np.asarray(_column(splits[split], label_column))
    pairs.append(check_pair({"images": images, "labels": labels}, "", f"{source}[{split}]"))
  train, held_out = pairs if len(pairs) == 2 else split_arrays(*pairs[0], valid_fraction)
  return arrays_to_rows(train, held_out, source)


def _stack(images: list[Any], title: str) -> np.ndarray:
  arrays = [np.asarray(image) for image in images]
  if not arrays:
    raise DataError(f"{title} has no rows")
  for i, array in enumerate(arrays):
    if array.shape != arrays[0].shape:
      raise DataError(
        f"{title}[{i}] has shape {array.shape}, the first {arrays[0].shape}: expected one shape"
      )
  return np.stack(arrays)


def _column(split: Any, name: str) -> list[Any]:
  if name not in split.column_names:
    raise DataError(f"dataset: no column {name!r}; there are {', '.join(split.column_names)}")
  return list(split[name])
