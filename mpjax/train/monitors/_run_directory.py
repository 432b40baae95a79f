"""A run's directory: one owner at a time, one config for ever, one place."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import IO, Any

import numpy as np
import yaml

from mpjax._types import ArrayLike
from mpjax.train._config import Config
from mpjax.train._config_file import read_tree
from mpjax.train._errors import ConfigError
from mpjax.train._files import GONE, set_aside, unfinished, unused, write_atomically


class RunDirectory:
  """Opens, or makes, the directory of a run and holds its lock.

  Attributes:
    path: where it is.
    before: the config that the run had, as plain data, if it had fewer steps; else `None`.
    said: what a person has to know of the directory as it was found, a line each.

  Args:
    config: of the run.
    owner: whether this process writes in it; the others of a run of several only know where it is.

  Raises:
    ConfigError: if the directory holds another config or something else altogether, or another process
      is running in it. Nothing in it was changed.
  """

  def __init__(self, config: Config, owner: bool = True):
    self._lock: IO[str] | None = None
    self._held: int | None = None
    self._config = config
    self.said: list[str] = []
    if "\0" in str(config.out):
      raise ConfigError(f"out={config.out!r}: expected the name of a directory")
    self.path = pathlib.Path(str(config.out))
    self.before: dict[str, Any] | None = None
    if not owner:
      return
    text = config.to_yaml()
    try:
      if self.path.exists():
        self.before = _require_same(self.path, text)
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = _lock(self.path / ".lock")
      if _never_began(self.path):
        write_atomically(self.path / "config.yaml", text.encode())
      self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else None
    except OSError as error:
      raise ConfigError(f"out={self.path}: cannot be written ({error.strerror})") from error

  @property
  def checkpoints(self) -> pathlib.Path:
    """Returns the folder where orbax writes."""
    return self.path / "checkpoints"

  def summary(self) -> dict[str, Any] | None:
    """Returns the `summary.json` of a finished run; `None` in a process that does not write there.

    It is `None`, too, where the run has more steps now than it had when it finished.
    """
    file = self.path / "summary.json"
    if self._lock is None or self.before is not None or not file.exists():
      return None
    try:
      summary = _json(file.read_bytes())
      if isinstance(summary, dict) and "final_loss" in summary and isinstance(summary.get("steps"), int):
        return summary
      moved = set_aside(file)
    except OSError as error:
      raise ConfigError(f"{file}: cannot be read or moved ({error.strerror})") from error
    self.said.append(
      f"{file.name} is not the summary of a run, which therefore goes on; it was moved to {moved}"
    )
    return None

  @property
  def is_there(self) -> bool:
    """Returns whether the path still leads to this directory, which nobody moved, deleted or replaced."""
    if self._held is None:
      return True
    try:
      return os.path.samestat(os.stat(self.path), os.fstat(self._held))
    except OSError as error:
      if error.errno in GONE:
        return False
      raise

  def refuge(self) -> pathlib.Path:
    """Returns where a checkpoint can be saved once the directory is no longer there.

    It is the directory at its new path; if it was deleted, one of the run's own with its config alone, at the
    old path or, where that is taken, beside it.
    """
    now = self._moved_to()
    if now is not None:
      return now
    path = unused(self.path)
    path.mkdir(parents=True)
    write_atomically(path / "config.yaml", self._config.to_yaml().encode())
    return path

  def _moved_to(self) -> pathlib.Path | None:
    assert self._held is not None
    try:  # Linux says where an open directory is; elsewhere, nobody does
      now = pathlib.Path(os.readlink(f"/proc/self/fd/{self._held}"))
      return now if os.path.samestat(os.stat(now), os.fstat(self._held)) else None
    except OSError:
      return None

  def grow(self, config: Config) -> None:
    """Writes the config with more steps; the run is no longer a finished one."""
    (self.path / "summary.json").unlink(missing_ok=True)
    write_atomically(self.path / "config.yaml", config.to_yaml().encode())
    self.before = None

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`, which marks the run as finished."""
    write_atomically(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

  def close(self) -> None:
    """Lets another process have the directory."""
    if self._lock is not None:
      self._lock.close()
    if self._held is not None:
      os.close(self._held)
      self._held = None


def _json(content: bytes) -> Any:
  """Returns the value of JSON text; `None` for text that is none."""
  try:
    return json.loads(content)
  except (ValueError, RecursionError):
    return None


def plain(value: ArrayLike) -> Any:
  """Returns a JSON value for an array scalar, exact for float32; non-finite floats become strings."""
  item = np.asarray(value).item()
  if isinstance(item, float) and not np.isfinite(item):
    return str(item)  # "nan", "inf", "-inf": JSON has no such numbers
  return item


# What no process needs to have as the others do.
_OWN = frozenset({"distributed", "train.checkpoint_wait"})
# What a run may have otherwise when it goes on. None changes what a step computes, but a mesh its rounding.
_FREE = _OWN | {
  "out",
  "numerics",
  "mesh",
  "data.workers",
  "train.log_every",
  "train.eval_every",
  "train.checkpoint_every",
  "train.keep_checkpoints",
  "train.max_skips",
}


def differences(
  theirs: object, ours: object, there: str, here: str, free: frozenset[str], key: str = ""
) -> list[str]:
  """Returns where two configs, as plain data, differ.

  Args:
    theirs: a config, or a part of one.
    ours: another.
    there: where the first one is, for a person.
    here: where the other one is.
    free: keys that may differ.
    key: of both, where they are parts.
  """
  if not (isinstance(theirs, dict) and isinstance(ours, dict)):
    return [] if theirs == ours else [f"{key}: {_short(theirs)} {there}, {_short(ours)} {here}"]
  found = []
  for name in sorted(theirs.keys() | ours.keys()):
    path = f"{key}.{name}" if key else name
    if path not in free:
      found += differences(theirs.get(name), ours.get(name), there, here, free, path)
  return found


def _short(value: object) -> str:
  """Returns a value as text; of a long mapping its beginning."""
  if not isinstance(value, dict) or len(value) < 3:
    return repr(value)
  first = next(iter(value))
  return f"{{{first!r}: {value[first]!r}, ...}}"


def config_mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  """Returns what is wrong between the configs of process 0 and of another one; `None` for nothing."""
  there, here = "in process 0", f"in process {process}"
  found = differences(first, other, there, here, _OWN)
  if not found:
    return None
  return f"the processes have different configs ({'; '.join(found[:3])}): start all with the same one"


def run_mismatch(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
  """Returns how the config of one run differs from another's in what a run keeps; `None` for not at all."""
  found = differences(theirs, ours, "there", "here", _FREE)
  found = [line for line in found if not line.startswith(_GROWING)]
  return "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "") if found else None


def _require_same(path: pathlib.Path, text: str) -> dict[str, Any] | None:
  """Returns the config in a run directory, if it differs by fewer steps alone; `None` for the same.

  Raises:
    ConfigError: for another config, or a directory that is not of a run.
  """
  file = path / "config.yaml"
  begun = {path / ".lock", unfinished(file)}  # all that a start leaves that was over before it had a config
  if not path.is_dir() or (not file.exists() and set(path.iterdir()) - begun):
    raise ConfigError(
      f"out={path}: exists and is not a run directory; nothing was changed, choose another out="
    )
  for entry in itertools.chain(path.iterdir(), path.glob("checkpoints/*"), path.glob("tensorboard/*")):
    if entry.is_symlink():  # a directory from elsewhere could have a run write over any file of the user's
      raise ConfigError(
        f"out={path}: {entry.relative_to(path)} in it is a link, and a run writes in its own directory "
        "alone: nothing was changed; remove the link, or make out= the directory that it leads to"
      )
  for name, is_right in _KINDS.items():
    entry = path / name
    if entry.exists() and not is_right(entry):
      kind = "a folder" if entry.is_dir() else "no folder"
      raise ConfigError(f"out={path}: {name} in it is {kind}, and nothing was changed; choose another out=")
  if not file.exists():
    return None
  try:
    theirs = read_tree(file)
  except ConfigError as error:
    raise ConfigError(f"{error}; choose another out=") from error
  ours = yaml.safe_load(text)
  grows = _steps(ours) > _steps(theirs) > 0
  found = differences(theirs, ours, "there", "here", _FREE)
  if grows:
    found = [line for line in found if not line.startswith(_GROWING)]
  if found and _never_began(path):
    return None
  if found:
    shown = "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "")
    raise ConfigError(
      f"out={path} holds a run of another config ({shown}): nothing was changed; choose another out=, "
      f"with train.init_from={path} to start from its parameters, or delete the directory to start over"
    )
  return theirs if grows else None


def _never_began(path: pathlib.Path) -> bool:
  """Returns whether a run directory has nothing of a run but its config, as one whose start was wrong."""
  metrics = path / "metrics.jsonl"
  kept = next(path.glob("checkpoints/*"), None) or (path / "summary.json").exists()
  return not (kept or (metrics.exists() and metrics.stat().st_size))


# What the entries of a run directory are.
_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "train.log")
_KINDS = dict.fromkeys(_FILES, pathlib.Path.is_file) | dict.fromkeys(
  ("checkpoints", "tensorboard", "damaged"), pathlib.Path.is_dir
)
# What a run may have otherwise when it is resumed with more steps.
_GROWING = ("train.steps: ", "optimizer.schedule_steps: ")


def _steps(config: dict[str, Any]) -> int:
  train = config.get("train")
  steps = train.get("steps") if isinstance(train, dict) else None
  return steps if isinstance(steps, int) else 0


def _lock(path: pathlib.Path) -> IO[str]:
  file = path.open("w")
  try:
    import fcntl
  except ImportError:  # Windows has no flock: two runs in one directory are then the user's to avoid
    return file
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    file.close()
    raise ConfigError(f"out={path.parent}: another process is running in this directory") from None
  return file
