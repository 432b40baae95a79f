"""Starting `jax.distributed`: which process of how many this is, from flags or from the environment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from mpjax import _compat
from mpjax.train._config import ConfigError, DistributedConfig
from mpjax.train.multiprocess._native_log import NativeLog
from mpjax.train.multiprocess._processes import Processes, one_line


class Flags(NamedTuple):
  """How a command line says which process of which run this is; all `None` for what the environment says."""

  coordinator: str | None = None
  processes: int | None = None
  process: int | None = None


def start(flags: Flags, settings: DistributedConfig) -> Processes:
  """Starts `jax.distributed`, if there are several processes, before anything touches a device.

  Raises:
    ConfigError: for flags that do not say it all, or an environment that cannot be made out.
  """
  several = _are_several(flags)
  processes = Processes(settings)
  if not several:
    return processes
  log = NativeLog(processes.lost)
  # Its handler would take SIGTERM from the loop, which has all processes agree on it by itself.
  jax.config.update("jax_enable_preemption_service", False)
  options: dict[str, Any] = {
    "initialization_timeout": max(1, round(settings.start_timeout_s)),
    "heartbeat_timeout_seconds": max(1, round(settings.heartbeat_timeout_s)),
    "shutdown_timeout_seconds": max(1, round(settings.hang_timeout_s)),
  }
  if flags.coordinator is not None:
    host = flags.coordinator.rpartition(":")[0]
    options |= {
      "coordinator_address": flags.coordinator,
      "num_processes": flags.processes,
      "process_id": flags.process,
      # A process started by hand has all devices of its machine, whatever allocation it runs in.
      "cluster_detection_method": "deactivate",
    }
    if host in ("localhost", "127.0.0.1"):
      options["coordinator_bind_address"] = flags.coordinator
  try:
    with _ctrl_c_at_once():
      jax.distributed.initialize(**options)
  except Exception as error:
    log.close()
    where = f" ({flags.coordinator} may be taken, or be another machine's)" if flags.process == 0 else ""
    raise ConfigError(f"the processes cannot be started together: {one_line(error)}{where}") from error
  # Devices of several processes come up together: one whose config is wrong would keep the others waiting.
  jax.devices()
  return processes.join(log)


def _are_several(flags: Flags) -> bool:
  given = {
    "--coordinator": flags.coordinator,
    "--num-processes": flags.processes,
    "--process-id": flags.process,
  }
  missing = [name for name, value in given.items() if value is None]
  if flags.processes == 1 and flags.process in (None, 0):
    return False
  if len(missing) == len(given):
    try:
      return _compat.processes_around() > 1
    except Exception as error:
      raise ConfigError(
        f"the environment does not say how many processes there are ({one_line(error)}); give "
        "--coordinator, --num-processes and --process-id, or --num-processes 1 for this one alone"
      ) from error
  if missing:
    raise ConfigError(
      f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: expected --coordinator "
      "HOST:PORT, --num-processes N and --process-id I together, or none of them"
    )
  host, _, port = (flags.coordinator or "").rpartition(":")
  if not (host and port.isdecimal() and 0 < int(port) < 65536):
    raise ConfigError(f"--coordinator {flags.coordinator}: expected HOST:PORT, as in 10.0.0.1:1234")
  if flags.process not in range(flags.processes or 0):
    raise ConfigError(
      f"--num-processes {flags.processes} --process-id {flags.process}: expected ids from 0 to one less than "
      "the number"
    )
  return True


@contextlib.contextmanager
def _ctrl_c_at_once() -> Iterator[None]:
  """In which Ctrl-C ends the process: Python's own handler would wait until native code returns."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
