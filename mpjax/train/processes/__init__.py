"""Several processes of one run: their start, agreement and signals, and the loss of a process."""

from mpjax.train.processes._agreement import code_mismatch, digest, everyone, versions
from mpjax.train.processes._interrupt import Interrupt, Poll
from mpjax.train.processes._processes import Processes
from mpjax.train.processes._start import Flags, start

__all__ = [
  "Flags",
  "Interrupt",
  "Poll",
  "Processes",
  "code_mismatch",
  "digest",
  "everyone",
  "start",
  "versions",
]
