"""Datasets that a config can name: text, token numbers, and images with labels, read by grain."""

from __future__ import annotations

from mpjax.train._errors import DataError
from mpjax.train._registry import DATASETS
from mpjax.train.data import _huggingface, _images, _text, _tokens  # noqa: F401 (they register what they read)
from mpjax.train.data._data_config import DataConfig
from mpjax.train.data._dataset import Batch, Data, Rows, RowSource, data_mismatch, describe, make_data
from mpjax.train.data._info import DataInfo, MissingFact, ModelInfo

__all__ = [
  "Batch",
  "Data",
  "DataConfig",
  "DataError",
  "DataInfo",
  "MissingFact",
  "ModelInfo",
  "RowSource",
  "Rows",
  "data_mismatch",
  "describe",
  "load_data",
]


def load_data(spec: DataConfig, *, seed: int) -> Data:
  """Loads the dataset that a config's `data` section describes.

  Args:
    spec: the section.
    seed: of the order of training batches; the split does not depend on it.

  Raises:
    DataError: for data that is missing or unfit, in one line.
  """
  try:
    made = DATASETS.find(spec.kind).fun(**spec.options)
  except DataError:
    raise
  except (OSError, ValueError) as error:  # of a function of the user's
    raise DataError(f"data.kind={spec.kind}: {describe(error)}") from error
  return make_data(made, spec, seed)
