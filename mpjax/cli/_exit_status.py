"""Exit statuses of the commands; docs/train.md has a table of them.

Each process of several ends with the status of the one that ended the run. JAX's runtime aborts a process
that cannot watch the coordinator when the coordinator is lost (134 in a shell).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpjax.train import ConfigError
from mpjax.train._errors import exit_status, one_line

_SIGNALS = 128  # a signal's status is its number and this


def outcome_of(error: BaseException) -> tuple[int, str] | None:
  """Returns the exit status and the line for an error; `None` if the error is not expected."""
  if isinstance(error, KeyboardInterrupt):
    return 130, "interrupted"
  status = exit_status(error)
  if status is None:
    return None
  text = one_line(str(error)) if isinstance(error, OSError) else str(error)
  return status, text if status > _SIGNALS else f"error: {text}"


@contextlib.contextmanager
def config_errors(key: str = "") -> Iterator[None]:
  """Turns a `ValueError` of its block into a `ConfigError` that begins with the key or flag."""
  try:
    yield
  except ValueError as error:
    if exit_status(error) is not None:
      raise
    raise ConfigError(f"{key}: {error}" if key else str(error)) from error
