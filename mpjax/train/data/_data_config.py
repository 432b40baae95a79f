"""The `data` section of a config."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from mpjax.train._registry import DATASETS, KindSection
from mpjax.train._sections import Natural, Positive


class DataConfig(KindSection):
  """The source of batches: keys of every kind, and the options of this kind's function.

  Attributes:
    kind: name of a registered kind.
    batch_size: rows of a batch, over all processes.
    eval_batches: largest number of batches in an evaluation; `None`: all.
    workers: threads that read ahead.
    options: the kind's own keys; in a file they are keys of the section.
  """

  kinds = DATASETS
  batch_size: Positive = 16
  eval_batches: Positive | None = None
  workers: Natural = 0

  @pydantic.model_validator(mode="before")
  @classmethod
  def _leave_out_no_path(cls, value: object) -> object:
    """Accepts `path: null` for every kind, also for a kind that reads no files."""
    if isinstance(value, Mapping) and "path" in value and value["path"] is None:
      return {key: each for key, each in value.items() if key != "path"}
    return value
