"""Seeing process 0 end by a connection to it, before JAX's runtime aborts the processes that lose it."""

from __future__ import annotations

import contextlib
import socket
import time

import jax

from mpjax import _compat

# Where process 0 says which port it holds open.
_PORT = "mpjax/first"
_TIMEOUT_S = 60


def hold_open() -> socket.socket | None:
  """Opens, in process 0, a port that closes when the process ends; nothing is read or written there.

  Returns:
    What has to be kept; `None` where no port can be opened.
  """
  client, _, count, address = _compat.coordination()
  try:
    held = socket.create_server((_LOCAL.get(_host(address), ""), 0), backlog=2 * count)
  except OSError:
    return None
  client.key_value_set(_PORT, str(held.getsockname()[1]))
  return held


def wait_for_its_end() -> bool:
  """Blocks, in another process, until process 0 has ended; returns False where that cannot be seen."""
  client, _, _, address = _compat.coordination()
  connected = False
  try:
    port = int(client.blocking_key_value_get(_PORT, _TIMEOUT_S * 1000))
    while True:
      with socket.create_connection((_host(address), port), timeout=_TIMEOUT_S) as connection:
        if connected:  # it is there, and only the connection has ended
          time.sleep(1)
        connected = True
        connection.settimeout(None)
        with contextlib.suppress(ConnectionResetError):
          connection.recv(1)
  except ConnectionRefusedError:
    return connected
  except (OSError, jax.errors.JaxRuntimeError):
    return False


# A run on one machine is nobody else's to see.
_LOCAL = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}


def _host(address: str | None) -> str:
  return (address or "").rpartition(":")[0].strip("[]")
