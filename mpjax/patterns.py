"""Regular expressions on module paths: a pattern has to match whole components, anywhere in the path."""

from __future__ import annotations

import functools
import re

_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


@functools.cache
def component_regex(pattern: str) -> re.Pattern[str]:
  """Compiles a regex for `search`: `head` matches `GPT/head` and what lies under it, not `GPT/header`.

  Raises:
    ValueError: if the pattern is no regular expression.
  """
  flags = _FLAGS.match(pattern) if isinstance(pattern, str) else None
  start = flags.end() if flags else 0
  try:
    re.compile(pattern)  # by itself: wrapped, an odd bracket could close ours
    return re.compile(rf"{pattern[:start]}(?:^|/)(?:{pattern[start:]})(?:/|$)")
  except (re.error, TypeError) as error:
    raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
