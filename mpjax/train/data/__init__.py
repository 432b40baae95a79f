"""Rows of a dataset as batches: shuffled, batched and read by grain."""

from mpjax.train.data._dataset import Batch, Data, RowSource, describe, load_data
from mpjax.train.data._info import DataInfo, MissingFact, ModelInfo

__all__ = ["Batch", "Data", "DataInfo", "MissingFact", "ModelInfo", "RowSource", "describe", "load_data"]
