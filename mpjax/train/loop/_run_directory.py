"""The directory of a run: one owner at a time, and the same config for ever."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import IO, Any

from mpjax.registry._task import DataInfo
from mpjax.train._errors import ConfigError
from mpjax.train._files import unfinished, write_atomically
from mpjax.train.config._config import Config
from mpjax.train.config._config_file import read_tree, run_mismatch
from mpjax.train.loop._output import LOGGER
from mpjax.train.setup._saved_run import FACTS, facts_text


class RunDirectory:
  """Opens or makes the directory of a run, and holds its lock.

  Attributes:
    path: its path.
    has_grown: whether the run had fewer steps before.

  Args:
    config: the config of the run.
    owner: whether this process writes in it; other processes of the run only use the path.

  Raises:
    ConfigError: if the directory holds a run of another config or is not a run's, or another process is
      running in it. Nothing in it was changed.
  """

  def __init__(self, config: Config, owner: bool = True):
    self._lock: IO[str] | None = None
    self._config = config
    if "\0" in str(config.out):
      raise ConfigError(f"out={config.out!r}: expected the name of a directory")
    self.path = pathlib.Path(str(config.out))
    self.has_grown = False
    if not owner:
      return
    try:
      if self.path.exists():
        self.has_grown = _require_same(self.path, config)
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = _lock(self.path / ".lock")
      if _never_began(self.path):
        self._write_config()
    except OSError as error:
      raise ConfigError(f"out={self.path}: cannot be written ({error.strerror})") from error

  def summary(self) -> dict[str, Any] | None:
    """Returns the `summary.json` of a finished run.

    `None` if the run has not finished, if its steps have grown since, and in a process that does not write.
    """
    file = self.path / "summary.json"
    if self._lock is None or self.has_grown or not file.exists():
      return None
    try:
      summary: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError:
      LOGGER.info(f"{file.name} is not the summary of a run: the run goes on")
      return None
    return summary

  def begin(self, info: DataInfo) -> None:
    """Writes the config as it is now, and facts about its data; the run no longer counts as finished."""
    if self._lock is None:
      return
    (self.path / "summary.json").unlink(missing_ok=True)
    self._write_config()
    write_atomically(self.path / FACTS, facts_text(self._config, info).encode())

  def _write_config(self) -> None:
    write_atomically(self.path / "config.yaml", self._config.to_yaml().encode())

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`, which marks the run as finished."""
    write_atomically(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

  def close(self) -> None:
    """Releases the lock of the directory."""
    if self._lock is not None:
      self._lock.close()


def _require_same(path: pathlib.Path, config: Config) -> bool:
  """Returns whether the config of a run directory has fewer steps; all else has to be the same.

  Raises:
    ConfigError: for another config, or a directory that is not a run's.
  """
  file = path / "config.yaml"
  begun = {path / ".lock", unfinished(file)}  # what a start leaves that ended before it wrote the config
  if not path.is_dir() or (not file.exists() and set(path.iterdir()) - begun):
    raise ConfigError(
      f"out={path}: exists and is not a run directory; nothing was changed, choose another out="
    )
  for entry in itertools.chain(path.iterdir(), path.glob("checkpoints/*"), path.glob("tensorboard/*")):
    if entry.is_symlink():  # a run could be made to overwrite any file of the user
      raise ConfigError(
        f"out={path}: {entry.relative_to(path)} in it is a link, and a run writes only in its own directory: "
        "nothing was changed; choose another out="
      )
  if not file.exists():
    return False
  try:
    theirs = read_tree(file)
  except ConfigError as error:
    raise ConfigError(f"{error}; choose another out=") from error
  steps = _steps(theirs)
  grows = config.train.steps > steps > 0
  differ = run_mismatch(theirs, config.tree, may_grow=grows)
  if differ and _never_began(path):
    return False
  if differ:
    raise ConfigError(
      f"out={path} holds a run of another config ({differ}): nothing was changed; choose another out=, "
      f"with train.init_from={path} to start from its parameters, or delete the directory to start over"
    )
  return grows


def _never_began(path: pathlib.Path) -> bool:
  """Returns whether a run directory has only a config, as after a start that failed."""
  metrics = path / "metrics.jsonl"
  kept = next(path.glob("checkpoints/*"), None) or (path / "summary.json").exists()
  return not (kept or (metrics.exists() and metrics.stat().st_size))


def _steps(config: dict[str, Any]) -> int:
  train = config.get("train")
  steps = train.get("steps") if isinstance(train, dict) else None
  return steps if isinstance(steps, int) else 0


def _lock(path: pathlib.Path) -> IO[str]:
  file = path.open("w")
  try:
    import fcntl
  except ImportError:  # Windows has no flock: the user must not start two runs in one directory
    return file
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    file.close()
    raise ConfigError(f"out={path.parent}: another process is running in this directory") from None
  return file
