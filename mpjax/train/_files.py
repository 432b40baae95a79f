"""Files of a run directory: written completely or not at all."""

from __future__ import annotations

import os
import pathlib


def write_atomically(path: pathlib.Path, content: bytes) -> None:
  """Writes a file; a kill or a crash at any moment leaves the old content or the new.

  A kill may also leave the temporary file, whose name ends in `.tmp`.
  """
  temporary = path.with_name(path.name + ".tmp")
  try:
    temporary.unlink(missing_ok=True)  # it could be a link to another file
    with temporary.open("xb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def how_to_go_on(run: pathlib.Path | None, again: str = "the same command") -> str:
  """Returns what the next start of a run does, as a part of a sentence.

  Args:
    run: the run directory; `None` if it is not known yet.
    again: names the start.
  """
  folders = [] if run is None else (run / "checkpoints").glob("*")
  steps = [int(folder.name) for folder in folders if folder.name.isdecimal()]
  if not steps:
    return f"no checkpoint was saved yet: {again} starts over"
  return f"the newest checkpoint is of step {max(steps)} in {run}: {again} resumes from it"
