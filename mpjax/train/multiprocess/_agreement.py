"""Agreement among the processes of a run, so that all of them do the same."""

from __future__ import annotations

import itertools
import json

import jax

from mpjax import _compat

_meetings = itertools.count()


def everyone(text: str, timeout_s: float) -> list[str]:
  """Returns the texts of all processes, in their order: each process calls this, and gets the same.

  They go through the coordination service: no device takes part, and there is a time-out.

  Args:
    text: what this process says.
    timeout_s: how long to wait for the others, in seconds.

  Raises:
    TimeoutError: if another process did not come.
  """
  client, process, count, _ = _compat.coordination()
  if client is None:
    return [text]
  key, milliseconds = f"mpjax/everyone/{next(_meetings)}", max(1, round(timeout_s * 1000))
  try:
    client.key_value_set(f"{key}/{process}", text)
    if process == 0:  # for thousands of processes: each asks once
      texts = [client.blocking_key_value_get(f"{key}/{i}", milliseconds) for i in range(count)]
      client.key_value_set(f"{key}/all", json.dumps(texts))
    found: list[str] = json.loads(client.blocking_key_value_get(f"{key}/all", milliseconds))
  except jax.errors.JaxRuntimeError as error:
    raise TimeoutError(f"another process did not come within {timeout_s:g} s") from error
  return found
