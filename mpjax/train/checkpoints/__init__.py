"""Checkpoints with checksums: asynchronous, atomic, the last ones and the best kept."""

from mpjax.train._errors import CheckpointError
from mpjax.train.checkpoints._checkpoints import Checkpoints
from mpjax.train.checkpoints._orbax_errors import STORAGE_ERRORS

__all__ = ["STORAGE_ERRORS", "CheckpointError", "Checkpoints"]
