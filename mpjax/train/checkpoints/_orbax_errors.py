"""Explains orbax's errors in a few words."""

from __future__ import annotations

import errno
import os

# The operating system's errors for files that cannot be written or read.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_LONGEST = 300


def reason(error: BaseException) -> str:
  """Returns one line on what went wrong: the operating system's words if it caused the error."""
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
