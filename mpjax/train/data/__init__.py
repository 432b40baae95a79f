"""Rows of a dataset as batches: shuffled, batched and read by grain."""

from __future__ import annotations

from mpjax.sharding import Rows
from mpjax.train._errors import DataError
from mpjax.train.config._config import DataConfig
from mpjax.train.config._registry import DATASETS
from mpjax.train.data._dataset import Batch, Data, RowSource, describe, make_data
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
  "describe",
  "load_data",
]


def load_data(spec: DataConfig, *, seed: int) -> Data:
  """Loads the dataset that a config's `data` section describes.

  Args:
    spec: the section.
    seed: seed of the order of training batches. The split does not depend on it.

  Raises:
    DataError: if data is missing or cannot be used; one line.
  """
  try:
    made = DATASETS.find(spec.kind).fun(**spec.options)
  except DataError:
    raise
  except (OSError, ValueError) as error:  # from a user's function
    raise DataError(f"data.kind={spec.kind}: {describe(error)}") from error
  return make_data(made, spec, seed)
