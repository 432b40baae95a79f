"""Training runs: configs, data and models, the loop, checkpoints, several processes.

Needs packages such as grain and orbax, which come with the extra `train` and are imported at first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from mpjax._render.install_text import pip_install

if TYPE_CHECKING:
  from mpjax.train._errors import Agreed, CheckpointError, ConfigError, DataError, Interrupted, Stuck
  from mpjax.train._export import ExportedModel, load_safetensors, save_safetensors
  from mpjax.train.config._config import Config, parse_config
  from mpjax.train.config._config_file import load_config
  from mpjax.train.config._plugins import (
    DataInfo,
    ModelInfo,
    Task,
    load_plugins,
    register_data,
    register_model,
    register_optimizer,
  )
  from mpjax.train.loop._run import RunResult, run
  from mpjax.train.loop._sinks import Tracker
  from mpjax.train.setup._experiment import make_setup, make_task
  from mpjax.train.setup._optimizers import make_optimizer
  from mpjax.train.setup._planner import Planner
  from mpjax.train.setup._saved_run import export_run

__all__ = [
  "Agreed",
  "CheckpointError",
  "Config",
  "ConfigError",
  "DataError",
  "DataInfo",
  "ExportedModel",
  "Interrupted",
  "ModelInfo",
  "Planner",
  "RunResult",
  "Stuck",
  "Task",
  "Tracker",
  "export_run",
  "load_config",
  "load_plugins",
  "load_safetensors",
  "make_optimizer",
  "make_setup",
  "make_task",
  "parse_config",
  "register_data",
  "register_model",
  "register_optimizer",
  "run",
  "save_safetensors",
]

# The lines of a run. The root logger does not get them: absl, under orbax, gives it a handler on stderr.
_LOGGER = logging.getLogger(__name__)
_LOGGER.propagate = False
if _LOGGER.level == logging.NOTSET:
  _LOGGER.setLevel(logging.INFO)

_MODULES = {
  "config._config": ("Config", "parse_config"),
  "config._config_file": ("load_config",),
  "_errors": ("Agreed", "CheckpointError", "ConfigError", "DataError", "Interrupted", "Stuck"),
  "_export": ("ExportedModel", "load_safetensors", "save_safetensors"),
  "setup._experiment": ("make_setup", "make_task"),
  "setup._optimizers": ("make_optimizer",),
  "setup._planner": ("Planner",),
  "setup._saved_run": ("export_run",),
  "config._plugins": (
    "DataInfo",
    "ModelInfo",
    "Task",
    "load_plugins",
    "register_data",
    "register_model",
    "register_optimizer",
  ),
  "loop._run": ("RunResult", "run"),
  "loop._sinks": ("Tracker",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
  if name not in _MODULE_OF:
    raise AttributeError(f"module 'mpjax.train' has no attribute {name!r}")
  try:
    value = getattr(importlib.import_module(f"mpjax.train.{_MODULE_OF[name]}"), name)
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package in ("", "mpjax"):
      raise
    said = f"mpjax.train.{name} needs {package}: {pip_install('train')}"
    raise ModuleNotFoundError(said, name=error.name) from error
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted(__all__)
