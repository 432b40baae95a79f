"""Exit statuses of the commands.

- 0: the command finished.
- 2: the config, the data or the usage is wrong (one line on stderr).
- 3: every step was skipped, or the state or the last loss is not finite.
- 4: a checkpoint or another file of the run cannot be written, or no checkpoint can be read.
- 5: another process of the run was lost, or there was no progress for `distributed.hang_timeout_s`.
- 130, 143, 129: Ctrl-C, SIGTERM or SIGHUP stopped the run after a checkpoint was saved.

Each process of several ends with the status of the one that ended the run. JAX's runtime aborts a process
that cannot watch the coordinator when the coordinator is lost (134 in a shell).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from mpjax.train import Interrupted
from mpjax.train._errors import exit_status


def guarded(run: Callable[[], object]) -> int:
  """Runs a command; its errors become one line on stderr and an exit status."""
  try:
    run()
  except BaseException as error:
    outcome = outcome_of(error)
    if outcome is None:
      raise
    status, line = outcome
    print(line, file=sys.stderr)
    return status
  return 0


def outcome_of(error: BaseException) -> tuple[int, str] | None:
  """Returns the exit status and the line for an error; `None` if the error is not expected."""
  if isinstance(error, KeyboardInterrupt):
    return 130, "interrupted"
  status = exit_status(error)
  if status is None:
    return None
  return status, str(error) if isinstance(error, Interrupted) else f"error: {error}"
