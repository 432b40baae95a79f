"""Policies as plain data and as text: `params=float32,compute=float16,output=float32,loss_scaling=dynamic`.

    text  = key "=" value { "," key "=" value }
    value = a JSON value (true, null, 1024.0, "...", {...}, [...]), or else the text before the next comma

With only the keys `params`, `compute` and `output`, it is a string of `jmp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_WORD = re.compile(r"[\w.+-]+")
_END = re.compile(r"\s*(?:,|$)")


def plain(value: Any) -> Any:
  """Returns a field's value as data for YAML and JSON: by its `to_dict`, if it has one."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, tuple):
    # Pairs, since the first match wins and writers of YAML sort the keys of a mapping.
    return [[pattern, brief(override)] for pattern, override in value]
  return value.to_dict() if hasattr(value, "to_dict") else value


def brief(value: Any) -> Any:
  """Returns the same in short, by its `shorthand`: `dynamic`, `{"recipe": "delayed", "margin": 1}`."""
  if isinstance(value, tuple):
    return {pattern: brief(override) for pattern, override in value}
  return value.shorthand() if hasattr(value, "shorthand") else plain(value)


def read_text(text: str) -> dict[str, Any]:
  """Returns keys and values of a text; values that are not JSON are strings.

  Raises:
    ValueError: for a part without `=`, or a repeated key.
  """
  values: dict[str, Any] = {}
  start = 0
  while start <= len(text):
    equals = text.find("=", start)
    if equals < 0:
      raise ValueError(f"{text[start:].strip()!r} in policy {text!r}: expected key=value")
    key = text[start:equals].strip()
    if key in values:
      raise ValueError(f"key {key!r} appears twice in policy {text!r}")
    values[key], start = _read_value(text, equals + 1)
  return values


def write_text(values: Mapping[str, Any]) -> str:
  """Returns the text that `read_text` reads back as these keys and values, which JSON can hold."""
  return ",".join(f"{key}={_write_value(value)}" for key, value in values.items())


def _read_value(text: str, start: int) -> tuple[Any, int]:
  """Returns the value that starts there, and the place where the next key starts."""
  start += len(text[start:]) - len(text[start:].lstrip())
  try:
    value, end = json.JSONDecoder().raw_decode(text, start)
  except ValueError:
    end = len(text) + 1
  else:
    if (comma := _END.match(text, end)) is not None:
      return value, max(comma.end(), comma.start() + 1)
  end = text.find(",", start)
  end = len(text) if end < 0 else end
  return text[start:end].strip(), end + 1


def _write_value(value: object) -> str:
  if isinstance(value, str) and _WORD.fullmatch(value) and _read_value(value, 0)[0] == value:
    return value
  return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
