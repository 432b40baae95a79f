"""Rows of a dataset as batches: shuffled, batched and read by grain."""

from mpjax.train.data._dataset import Batch, Data, RowSource, describe, load_data

__all__ = ["Batch", "Data", "RowSource", "describe", "load_data"]
