"""Training runs: configs, data and models, the loop, checkpoints, several processes.

Needs packages such as grain and orbax, which come with the extra `train` and are imported at first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from mpjax._gone import missing
from mpjax._render.plain_text import pip_install

if TYPE_CHECKING:
  from mpjax.registry import DataInfo as DataInfo, ModelInfo as ModelInfo, Task as Task
  from mpjax.train._errors import (
    Agreed as Agreed,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    Interrupted as Interrupted,
    Stuck as Stuck,
  )
  from mpjax.train._export import (
    ExportedModel as ExportedModel,
    load_safetensors as load_safetensors,
    save_safetensors as save_safetensors,
  )
  from mpjax.train.config._config import Config as Config
  from mpjax.train.config._config_file import load_config as load_config
  from mpjax.train.config._plugins import (
    load_plugins as load_plugins,
    register_data as register_data,
    register_model as register_model,
    register_optimizer as register_optimizer,
  )
  from mpjax.train.loop._run import RunResult as RunResult, run as run
  from mpjax.train.loop._sinks import Tracker as Tracker
  from mpjax.train.setup._experiment import make_setup as make_setup
  from mpjax.train.setup._optimizers import make_optimizer as make_optimizer
  from mpjax.train.setup._planner import Planner as Planner
  from mpjax.train.setup._saved_run import export_run as export_run

# The lines of a run. The root logger does not get them: absl, under orbax, gives it a handler on stderr.
_LOGGER = logging.getLogger(__name__)
_LOGGER.propagate = False
if _LOGGER.level == logging.NOTSET:
  _LOGGER.setLevel(logging.INFO)

_MODULES = {
  "registry": ("DataInfo", "ModelInfo", "Task"),
  "train._errors": ("Agreed", "CheckpointError", "ConfigError", "DataError", "Interrupted", "Stuck"),
  "train._export": ("ExportedModel", "load_safetensors", "save_safetensors"),
  "train.config._config": ("Config",),
  "train.config._config_file": ("load_config",),
  "train.config._plugins": ("load_plugins", "register_data", "register_model", "register_optimizer"),
  "train.loop._run": ("RunResult", "run"),
  "train.loop._sinks": ("Tracker",),
  "train.setup._experiment": ("make_setup",),
  "train.setup._optimizers": ("make_optimizer",),
  "train.setup._planner": ("Planner",),
  "train.setup._saved_run": ("export_run",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
  if name not in _MODULE_OF:
    raise missing("mpjax.train", name)
  try:
    value = getattr(importlib.import_module(f"mpjax.{_MODULE_OF[name]}"), name)
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
