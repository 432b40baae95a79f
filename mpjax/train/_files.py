"""Files of a run directory: written whole or not at all, and never thrown away."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import shutil

# What is said of a directory that is no longer there; the last one if another machine took it away.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def write_atomically(path: pathlib.Path, content: bytes) -> None:
  """Writes a file; a kill or a crash at any moment leaves the old one or the new one.

  What a kill leaves, too, is the `unfinished` one.
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
  """Returns where a file is while it is written."""
  return path.with_name(path.name + ".tmp")


def set_aside(path: pathlib.Path, *, keep: bool = False) -> pathlib.Path:
  """Moves a file to `damaged/` beside it, or with `keep` copies it there; returns where it is."""
  target = unused(path.parent / "damaged" / path.name)
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
