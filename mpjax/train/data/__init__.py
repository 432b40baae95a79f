"""Datasets that a config can name: bytes of text, and images with labels, read by grain."""

from __future__ import annotations

from mpjax.dtypes import did_you_mean
from mpjax.train._config import DataConfig
from mpjax.train._errors import DataError
from mpjax.train.data._dataset import Batch, Data, DataInfo, Rows, data_mismatch, describe
from mpjax.train.data._huggingface import load_huggingface
from mpjax.train.data._images import load_digits, load_npz
from mpjax.train.data._text import load_stdlib, load_text

__all__ = ["Batch", "Data", "DataError", "DataInfo", "Rows", "data_mismatch", "describe", "load_data"]

_LOADERS = {
  "stdlib": load_stdlib,
  "text": load_text,
  "digits": load_digits,
  "npz": load_npz,
  "huggingface": load_huggingface,
}


def load_data(spec: DataConfig, *, seed: int) -> Data:
  """Loads the dataset that a config's `data` section describes.

  Args:
    spec: the section: `kind`, `batch_size`, and what the kind needs.
    seed: of the order of training batches; the split does not depend on it.

  Raises:
    DataError: for data that is missing or unfit, in one line.
  """
  if spec.kind not in _LOADERS:
    raise DataError(
      f"unknown data.kind {spec.kind!r}: expected one of {', '.join(_LOADERS)}"
      + did_you_mean(spec.kind, _LOADERS)
    )
  return _LOADERS[spec.kind](spec, seed)
