"""`mpjax train`: trains a config's model, in one process or several (flags, or a scheduler's environment)."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from typing import Any

import jax

from mpjax import _compat
from mpjax.policy import bare_dtype_advice
from mpjax.train import Config, ConfigError, load_config, load_plugins
from mpjax.train._errors import one_line
from mpjax.train.config._config import DistributedConfig
from mpjax.train.config._config_file import read_waits
from mpjax.train.loop._run import train_together
from mpjax.train.loop._sinks import LOGGER, Output
from mpjax.train.processes import LOST, Processes


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""
  processes = start(options, read_waits(options.config, options.overrides))

  def load() -> Config:
    load_plugins(options.plugin)
    config = load_config(options.config, options.overrides)
    advice = bare_dtype_advice(config.policy)
    if processes.first and advice is not None:
      LOGGER.warning(f"warning: {advice}")
    return config

  with Output() as output:
    return processes.end(lambda: train_together(load, processes, output))


def start(flags: argparse.Namespace, settings: DistributedConfig) -> Processes:
  """Starts `jax.distributed` if there are several processes. Call it before anything uses a device.

  Raises:
    ConfigError: if flags are missing or wrong, the port is taken, or JAX cannot start the processes.
  """
  if not _are_several(flags):
    return Processes(settings, flags.interrupt)
  # Its handler would take SIGTERM away from the loop, which lets all processes agree on it.
  jax.config.update("jax_enable_preemption_service", False)
  options: dict[str, Any] = {
    # Longer than ours: where it ends, the runtime aborts this process with a trace of its own.
    "initialization_timeout": round(settings.start_timeout_s) + 60,
    "heartbeat_timeout_seconds": max(1, round(settings.heartbeat_timeout_s)),
    "shutdown_timeout_seconds": max(1, round(settings.hang_timeout_s)),
  }
  if (address := flags.coordinator) is not None:
    # A process started by hand uses all devices of its machine, in every allocation.
    options |= {"coordinator_address": address, "cluster_detection_method": "deactivate"}
    options |= {"num_processes": flags.num_processes, "process_id": flags.process_id}
    host, _, port = address.rpartition(":")
    if is_local := host in ("localhost", "127.0.0.1"):
      options["coordinator_bind_address"] = address
    if flags.process_id == 0:
      try:  # JAX 0.12 ends in a segmentation fault
        socket.create_server((host if is_local else "", int(port))).close()
      except OSError as error:
        why = f"{os.strerror(error.errno or 0)}: expected a free port of this machine"
        raise ConfigError(f"--coordinator {address}: {why}") from error
  timer = threading.Timer(settings.start_timeout_s, _give_up, [settings.start_timeout_s])
  timer.daemon = True
  try:
    # It waits in native code, where a flag is not looked at.
    with flags.interrupt.off():
      timer.start()
      jax.distributed.initialize(**options)
  except (RuntimeError, ValueError, OSError) as error:  # JAX's own are RuntimeErrors
    raise ConfigError(f"the processes cannot be started together: {one_line(str(error))}") from error
  finally:
    timer.cancel()
  # Devices of several processes start together: a process with a wrong config would make the others wait.
  jax.devices()
  return Processes(settings, flags.interrupt)


def processes_around() -> int:
  """Returns the number of processes by the environment (Slurm, Kubernetes, Cloud TPU, Open MPI)."""
  if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
    return 1  # a step of one task, such as an interactive shell, in a job of several
  for kind in _compat.cluster_kinds():
    # Without an index in a job, a machine in Kubernetes is alone.
    lone = kind.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in os.environ
    if not lone and kind.is_env_present():
      return kind.get_process_count()
  return 1


def _are_several(flags: argparse.Namespace) -> bool:
  address, count, number = flags.coordinator, flags.num_processes, flags.process_id
  if count == 1 and number in (None, 0):
    return False
  if address is None and count is None and number is None:
    try:
      return processes_around() > 1
    except (RuntimeError, ValueError, OSError, LookupError) as error:
      raise ConfigError(
        f"the environment does not say how many processes there are ({one_line(str(error))}); give "
        "--coordinator, --num-processes and --process-id, or --num-processes 1 for this one alone"
      ) from error
  host, _, port = (address or "").rpartition(":")
  if not host or not port.isdecimal() or int(port) not in range(1, 65536) or number not in range(count or 0):
    raise ConfigError(
      "expected --coordinator HOST:PORT, --num-processes N and --process-id I, from 0 to N - 1, together, or "
      "none of them"
    )
  return True


def _give_up(limit_s: float) -> None:
  print(
    f"error: the processes did not come together within distributed.start_timeout_s={limit_s:g} seconds: "
    "one did not reach the coordinator, or not all were there in time",
    file=sys.stderr,
    flush=True,
  )
  os._exit(LOST)
