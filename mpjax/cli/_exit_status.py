"""Exit statuses of the commands.

0 the command finished; 2 a config, data or usage error (one line on stderr); 3 stopped because every step was
skipped, or the state or the last loss is not finite; 4 a checkpoint or another file of the run could not be
written, or no checkpoint can be read; 5 another process of the run was lost, or nothing moved for
`distributed.hang_timeout_s`; 130 Ctrl-C, 143 SIGTERM and 129 SIGHUP, after a checkpoint was saved. Of several
processes each ends with the status of the one that ended the run; one that cannot watch the coordinator is
aborted by JAX's runtime when it is lost (134 in a shell).
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
  """Returns the exit status and the line of an error; `None` for one that is not expected."""
  if isinstance(error, KeyboardInterrupt):
    return 130, "interrupted"
  status = exit_status(error)
  if status is None:
    return None
  return status, str(error) if isinstance(error, Interrupted) else f"error: {error}"
