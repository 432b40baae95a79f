"""The errors that a run ends with, each with the exit status of its command."""

from __future__ import annotations


class ConfigError(ValueError):
  """A config that cannot be run: one line that names the key, the value and the way out."""

  exit_status = 2


class DataError(ValueError):
  """Data that is missing or unfit, in one line that names it."""

  exit_status = 2


class Stuck(Exception):
  """Every step is skipped at the lowest loss scale, or the state or the last loss is not finite."""

  exit_status = 3


class CheckpointError(Exception):
  """A checkpoint cannot be written, or none can be read; the message is one line."""

  exit_status = 4


class Interrupted(Exception):
  """The run was stopped by a signal after its checkpoint was saved; `signum` says which."""

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum
    self.exit_status = 128 + signum


class Agreed(Exception):
  """An error that at least one process met, raised in all of them: one line, and the exit status."""

  def __init__(self, message: str, exit_status: int):
    super().__init__(message)
    self.exit_status = exit_status


# What the user can mend, met by one process and told to the others.
MENDABLE = (ConfigError, DataError, CheckpointError)
# What comes to all processes of a run alike.
TOGETHER = (Agreed, Interrupted, Stuck)


def exit_status(error: BaseException) -> int | None:
  """Returns the exit status of an error that a run is expected to end with; `None` for others."""
  return error.exit_status if isinstance(error, (*MENDABLE, *TOGETHER)) else None
