"""Files of a run directory: written completely or not at all, and never deleted."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import shutil

# Errors for a directory that no longer exists; ESTALE if another machine removed it.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def write_atomically(path: pathlib.Path, content: bytes) -> None:
  """Writes a file; a kill or a crash at any moment leaves the old content or the new.

  A kill may also leave the `unfinished` file.
  """
  temporary = unfinished(path)
  try:
    with temporary.open("wb") as file:
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


def set_aside(path: pathlib.Path, run: pathlib.Path | None = None, *, keep: bool = False) -> pathlib.Path:
  """Moves a file to `damaged/` in a run directory, or copies it there with `keep`; returns the new path.

  Without `run`, the file's own folder is the run directory.
  """
  target = unused((run or path.parent) / "damaged" / path.name)
  target.parent.mkdir(exist_ok=True)
  if keep:
    shutil.copyfile(path, target)
  else:
    os.rename(path, target)
  return target


def unused(path: pathlib.Path) -> pathlib.Path:
  """Returns the path, or the first of `path.1`, `path.2`, ... that does not exist yet."""
  paths = itertools.chain([path], (path.with_name(f"{path.name}.{i}") for i in itertools.count(1)))
  return next(path for path in paths if not os.path.lexists(path))
