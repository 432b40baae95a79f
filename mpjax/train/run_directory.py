"""A run's directory: one owner at a time, one config for ever, metrics without a gap or a repeat."""

from __future__ import annotations

import json
import os
import pathlib
from typing import IO, Any

import numpy as np
import pydantic
import yaml

from mpjax.train.config import Config, ConfigError


class RunDirectory:
  """Opens, or makes, the directory of a run and holds its lock.

  Raises:
    ConfigError: if the directory holds another config or something else altogether, or another process
      is running in it. Nothing in it was changed.
  """

  def __init__(self, config: Config):
    self.path = pathlib.Path(str(config.out))
    text = config.to_yaml()
    if self.path.exists():
      _require_same(self.path, text)
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = _lock(self.path / ".lock")
      if not (self.path / "config.yaml").exists():
        _write_atomically(self.path / "config.yaml", text)
    except OSError as error:
      raise ConfigError(f"out={self.path}: cannot be written ({error.strerror})") from error

  @property
  def checkpoints(self) -> pathlib.Path:
    """Where orbax writes."""
    return self.path / "checkpoints"

  def summary(self) -> dict[str, Any] | None:
    """The `summary.json` of a finished run."""
    file = self.path / "summary.json"
    return json.loads(file.read_text()) if file.exists() else None

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`, which marks the run as finished."""
    _write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

  def close(self) -> None:
    """Lets another process have the directory."""
    self._lock.close()


class MetricsFile:
  """`metrics.jsonl`: one JSON object a line, in step order.

  Args:
    path: the file; lines of steps after `resume_step`, and a line that a kill cut short, are dropped, since
      the resumed run writes them again.
    resume_step: step of the checkpoint that the run resumes from.
  """

  def __init__(self, path: pathlib.Path, resume_step: int):
    kept = []
    if path.exists():
      for line in path.read_text().splitlines(keepends=True):
        try:
          if line.endswith("\n") and json.loads(line)["step"] <= resume_step:
            kept.append(line)
        except (ValueError, KeyError):
          break
    _write_atomically(path, "".join(kept))
    self._file = path.open("a", buffering=1)

  def write(self, record: dict[str, Any]) -> None:
    """Appends a record; the line is handed to the operating system before this returns."""
    self._file.write(json.dumps(record) + "\n")

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def plain(value: Any) -> Any:
  """A JSON value for an array scalar, exact for float32; non-finite floats become strings."""
  item = np.asarray(value).item()
  if isinstance(item, float) and not np.isfinite(item):
    return str(item)  # "nan", "inf", "-inf": JSON has no such numbers
  return item


def _require_same(path: pathlib.Path, text: str) -> None:
  file = path / "config.yaml"
  if not path.is_dir() or (not file.exists() and any(p.name != ".lock" for p in path.iterdir())):
    raise ConfigError(
      f"out={path}: exists and is not a run directory; nothing was changed, choose another out="
    )
  if not file.exists():
    return
  try:
    theirs, ours = yaml.safe_load(file.read_text()), yaml.safe_load(text)
  except yaml.YAMLError as error:
    raise ConfigError(
      f"{file}: cannot be read ({' '.join(str(error).split())}); choose another out="
    ) from error
  differences = _differences(_with_defaults(theirs), ours)
  if differences:
    shown = "; ".join(differences[:3]) + ("; ..." if len(differences) > 3 else "")
    raise ConfigError(
      f"out={path} holds a run of another config ({shown}): nothing was changed; choose another out=, "
      "or delete the directory to start over"
    )


def _with_defaults(tree: Any) -> Any:
  """A config of an earlier release with the keys that it did not have; as it is, if it is no config."""
  try:
    return Config.model_validate(tree).model_dump(mode="json") | {"policy": tree["policy"]}
  except (pydantic.ValidationError, TypeError, KeyError):
    return tree


def _differences(theirs: Any, ours: Any, key: str = "") -> list[str]:
  if not (isinstance(theirs, dict) and isinstance(ours, dict)):
    return [] if theirs == ours else [f"{key}: {theirs!r} there, {ours!r} here"]
  found = []
  for name in sorted(theirs.keys() | ours.keys()):
    path = f"{key}.{name}" if key else name
    if path not in ("out", "numerics"):  # neither changes what a run computes
      found += _differences(theirs.get(name), ours.get(name), path)
  return found


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


def _write_atomically(path: pathlib.Path, text: str) -> None:
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text)
  os.replace(temporary, path)
