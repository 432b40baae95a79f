"""Several processes of one run: their start, agreement and signals, and the loss of a process."""

from mpjax.train.multiprocess._agreement import code_mismatch, digest, everyone, versions
from mpjax.train.multiprocess._interrupt import Interrupt, Poll
from mpjax.train.multiprocess._processes import Processes
from mpjax.train.multiprocess._start import Flags, start

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
