"""The batches of an inspection: one or several, their micro-batches and rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from mpjax._types import PyTree
from mpjax.step import split_batch


def listed(batches: PyTree) -> Iterable[Any]:
  """Returns the batches; a tree of arrays that is not a list is a single batch."""
  if isinstance(batches, (list, Iterator)):
    return batches
  is_leaf = jax.tree_util.all_leaves([batches])
  return batches if is_leaf and isinstance(batches, Iterable) and not hasattr(batches, "shape") else [batches]


def micro_batches(batch: PyTree, n: int) -> Iterator[Any]:
  """Yields the n micro-batches of a batch, one after the other."""
  if n == 1:
    yield batch
    return
  split = split_batch(n, batch)
  for i in range(n):
    yield jax.tree.map(operator.itemgetter(i), split)


def rows(batch: PyTree) -> int:
  """Returns the first dimension that most leaves of a batch have; 1 if all are scalars."""
  lengths = [shape[0] for shape in map(np.shape, jax.tree.leaves(batch)) if shape]
  return max(lengths, key=lengths.count, default=1)
