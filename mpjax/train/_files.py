"""Files of a run directory: written completely or not at all, and never deleted."""

from __future__ import annotations

import itertools
import os
import pathlib


def write_atomically(path: pathlib.Path, content: bytes) -> None:
  """Writes a file; a kill or a crash at any moment leaves the old content or the new.

  A kill may also leave the `unfinished` file.
  """
  temporary = unfinished(path)
  try:
    temporary.unlink(missing_ok=True)  # it could be a link to another file
    with temporary.open("xb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


def unfinished(path: pathlib.Path) -> pathlib.Path:
  """Returns the temporary path of a file that is being written."""
  return path.with_name(path.name + ".tmp")


def set_aside(path: pathlib.Path, run: pathlib.Path) -> pathlib.Path:
  """Moves a file or folder to `damaged/` in a run directory; returns the new path."""
  target = run / "damaged" / path.name
  target.parent.mkdir(exist_ok=True)
  paths = itertools.chain([target], (target.with_name(f"{path.name}.{i}") for i in itertools.count(1)))
  target = next(path for path in paths if not os.path.lexists(path))
  os.rename(path, target)
  return target
