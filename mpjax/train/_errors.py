"""The errors that end a run, each with the exit status of its command."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from mpjax.registry._names import ConfigError as ConfigError, DataError as DataError


class Stuck(Exception):
  """Every step was skipped at the lowest loss scale, or the state or the last loss is not finite."""

  exit_status = 3


class CheckpointError(Exception):
  """A checkpoint cannot be written, or no checkpoint can be read: one line that says why."""

  exit_status = 4


class Interrupted(Exception):
  """A signal, `signum`, stopped the run: after its checkpoint was saved, or before the first step."""

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum
    self.exit_status = 128 + signum


class Agreed(Exception):
  """An error in at least one process, raised in all of them: one line and an exit status."""

  def __init__(self, message: str, exit_status: int):
    super().__init__(message)
    self.exit_status = exit_status


# Errors that the user can fix. The process that meets one tells the others.
MENDABLE = (ConfigError, DataError, CheckpointError)
# Errors that all processes of a run raise together.
TOGETHER = (Agreed, Interrupted, Stuck)


def causes(error: BaseException) -> Iterator[BaseException]:
  """Yields an error, its cause, the cause of that, and so on."""
  found: list[BaseException] = []
  link: BaseException | None = error
  while link is not None and link not in found:
    yield link
    found.append(link)
    link = link.__cause__ or link.__context__


def one_line(text: str) -> str:
  """Returns the text of an error on one line of at most some 300 characters."""
  text = " ".join(text.split())
  return text if len(text) <= 300 else f"{text[:300]}..."


def exit_status(error: BaseException) -> int | None:
  """Returns the exit status of an error that is expected to end a run, or `None` for other errors."""
  if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # one that the user gave
    return ConfigError.exit_status
  return error.exit_status if isinstance(error, (*MENDABLE, *TOGETHER)) else None
