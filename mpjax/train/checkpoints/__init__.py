"""Checkpoints with checksums: asynchronous, atomic and finite; the newest and the best are kept."""

from mpjax.sharding._checksums import NonFiniteLeaves
from mpjax.train._errors import CheckpointError
from mpjax.train.checkpoints._checkpoints import Checkpoints
from mpjax.train.checkpoints._integrity import STORAGE_ERRORS, nonfinite_text, quiet

__all__ = ["STORAGE_ERRORS", "CheckpointError", "Checkpoints", "NonFiniteLeaves", "nonfinite_text", "quiet"]
