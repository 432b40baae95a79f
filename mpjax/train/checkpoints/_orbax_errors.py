"""What orbax raises, in a few words, and told once."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import sys
from typing import Any

# What the operating system says of files that cannot be written or read.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_LONGEST = 300


def reason(error: BaseException) -> str:
  """What went wrong: the operating system's words if they are among what the error came from, on one line."""
  chain: list[BaseException] = []
  link: BaseException | None = error
  while link is not None and link not in chain:
    chain.append(link)
    link = link.__cause__ or link.__context__
  for link in chain:
    for text in map(os.strerror, STORAGE_ERRORS):
      if text in str(link):
        return text
  if any("DEADLINE_EXCEEDED" in str(link) for link in chain):
    return "another process did not do its part in time"
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(str(error).split()).partition(" [tensorstore_spec")[0]
  if not isinstance(error, (OSError, ValueError)) or not text:
    text = f"{type(error).__name__}: {text}"
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def tell_once() -> None:
  """Keeps orbax from writing to stderr what it raises as well, and what it drops when it raises."""
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_not_of_orbax)
  hook = sys.unraisablehook
  if getattr(hook, "of_mpjax", False):
    return

  def unraisable(event: Any) -> None:
    if not _dropped_by_orbax(event):
      hook(event)

  unraisable.of_mpjax = True  # type: ignore[attr-defined]
  sys.unraisablehook = unraisable


def _not_of_orbax(record: logging.LogRecord) -> bool:
  return "orbax" not in (record.getMessage() if record.name == "asyncio" else record.pathname)


def _dropped_by_orbax(event: Any) -> bool:
  """Whether it is of the reads that were under way when another one failed."""
  if inspect.iscoroutine(event.object):
    return "orbax" in event.object.cr_code.co_filename
  return event.object is None and str(event.exc_value) == "Event loop is closed"
