"""A Hugging Face dataset, where the `datasets` package is installed: text, or images with labels."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import numpy as np

from mpjax.train.data.dataset import Data, DataError
from mpjax.train.data.images import arrays_to_data, check_pair, split_arrays
from mpjax.train.data.text import documents_to_data


def load_huggingface(spec: Any, seed: int) -> Data:
  """A dataset saved at `path`, or of the hub by `name`: text as bytes, or images with labels.

  Without `eval_split` a `valid_fraction` of the training split is held out.
  """
  try:
    datasets = importlib.import_module("datasets")
  except ImportError:
    raise DataError("data.kind=huggingface needs the datasets package: pip install datasets") from None
  source = spec.path or spec.name
  if not isinstance(source, str):
    raise DataError("data.kind=huggingface: expected data.path (a saved dataset) or data.name (of the hub)")
  try:
    saved = pathlib.Path(source).is_dir()
    splits = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
  except Exception as error:  # the package raises many kinds, from missing files to failed connections
    raise DataError(f"cannot load dataset {source!r}: {' '.join(str(error).split())}") from error
  if not isinstance(splits, dict):
    splits = {spec.train_split: splits}
  wanted = [spec.train_split] + ([spec.eval_split] if spec.eval_split else [])
  for name in wanted:
    if name not in splits:
      raise DataError(f"dataset {source!r}: no split {name!r}; there are {', '.join(splits)}")
  if spec.text_column:
    documents = {
      f"{split}/{i}": text.encode()
      for split in wanted
      for i, text in enumerate(_column(splits[split], spec.text_column))
    }
    return documents_to_data(
      documents, source, spec, seed, held_out_prefix=f"{spec.eval_split}/" if spec.eval_split else None
    )
  if not (spec.image_column and spec.label_column):
    raise DataError(
      "data.kind=huggingface: expected data.text_column, or data.image_column and data.label_column"
    )
  pairs = []
  for split in wanted:
    images = np.stack([np.asarray(image) for image in _column(splits[split], spec.image_column)])
    labels = np.asarray(_column(splits[split], spec.label_column))
    pairs.append(check_pair({"images": images, "labels": labels}, "", f"{source}[{split}]"))
  train, held_out = pairs if len(pairs) == 2 else split_arrays(*pairs[0], spec.valid_fraction)
  return arrays_to_data(train, held_out, source, spec, seed)


def _column(split: Any, name: str) -> list[Any]:
  if name not in split.column_names:
    raise DataError(f"dataset: no column {name!r}; there are {', '.join(split.column_names)}")
  return list(split[name])
