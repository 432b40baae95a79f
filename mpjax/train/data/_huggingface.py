"""A Hugging Face dataset, where the `datasets` package is installed: text, or images with labels."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

import numpy as np

from mpjax.train._config import DataConfig
from mpjax.train._errors import DataError
from mpjax.train.data._dataset import Data
from mpjax.train.data._images import arrays_to_data, check_pair, split_arrays
from mpjax.train.data._text import documents_to_data


def load_huggingface(spec: DataConfig, seed: int) -> Data:
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
  saved = isinstance(spec.path, str) and pathlib.Path(spec.path).is_dir()
  source = spec.path if saved else spec.name or spec.path
  if isinstance(source, list) or isinstance(spec.path, list) or not source:
    raise DataError("data.kind=huggingface: expected data.path (a saved dataset) or data.name (of the hub)")
  try:
    splits = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
  except Exception as error:  # the package raises many kinds, from missing files to failed connections
    raise DataError(f"cannot load dataset {source!r}: {' '.join(str(error).split())}") from error
  if not isinstance(splits, dict):
    splits = {spec.train_split: splits}
  if spec.eval_split == spec.train_split:
    raise DataError(f"data.eval_split={spec.eval_split!r} is the training split: expected another, or none")
  wanted = [spec.train_split] + ([spec.eval_split] if spec.eval_split else [])
  for name in wanted:
    if name not in splits:
      raise DataError(f"dataset {source!r}: no split {name!r}; there are {', '.join(splits)}")
  if spec.text_column:
    documents = {}
    for split in wanted:
      for i, text in enumerate(_column(splits[split], spec.text_column)):
        if not isinstance(text, str):
          raise DataError(
            f"{source}[{split}]: {spec.text_column}[{i}] is {type(text).__name__}: expected a string"
          )
        documents[f"{split}/{i}"] = text.encode()
    return documents_to_data(
      documents, source, spec, seed, held_out_prefix=f"{spec.eval_split}/" if spec.eval_split else None
    )
  if not (spec.image_column and spec.label_column):
    raise DataError(
      "data.kind=huggingface: expected data.text_column, or data.image_column and data.label_column"
    )
  pairs = []
  for split in wanted:
    images = _stack(_column(splits[split], spec.image_column), f"{source}[{split}]: {spec.image_column}")
    labels = np.asarray(_column(splits[split], spec.label_column))
    pairs.append(check_pair({"images": images, "labels": labels}, "", f"{source}[{split}]"))
  train, held_out = pairs if len(pairs) == 2 else split_arrays(*pairs[0], spec.valid_fraction)
  return arrays_to_data(train, held_out, source, spec, seed)


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
