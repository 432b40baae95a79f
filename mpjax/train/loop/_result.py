"""What a finished run leaves: its summary, its exported weights, and a table on the terminal."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mpjax.step import TrainState
from mpjax.train._export import WIDE, export_text, save_safetensors
from mpjax.train.loop._output import LOGGER
from mpjax.train.loop._progress import fp8_row, show_summary
from mpjax.train.loop._run_directory import RunDirectory
from mpjax.train.loop._step_records import Records
from mpjax.train.processes import Processes
from mpjax.train.setup._evaluation import weights_of
from mpjax.train.setup._setup import Setup


def leave_result(
  setup: Setup,
  state: TrainState,
  records: Records,
  directory: RunDirectory,
  processes: Processes,
) -> dict[str, Any]:
  """Writes what a finished run leaves, in process 0, and returns its summary."""
  config, policy = setup.config, setup.policy
  summary = {
    "policy": config.policy if isinstance(config.policy, str) else str(policy),
    **fp8_row(policy),
    "backend": jax.default_backend(),
    "steps": config.train.steps,
    **records.summary(),
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.arrays)),
    "resolved_policy": policy.to_dict(),
  }
  export, dtype = config.train.export, config.train.export_dtype
  if export is not None:  # gathered by all, written by one
    weights = jax.jit(functools.partial(weights_of, policy, masters=dtype in WIDE))
    params, model_state = processes.fetch((weights(state), state.model_state))
  if processes.first:
    if export is not None:
      file = directory.path / "model.safetensors"
      save_safetensors(file, config, setup.info, params, model_state, dtype)
      LOGGER.info(export_text(file))
    directory.write_summary(summary)
    show_summary(summary, directory.path)
  return summary
