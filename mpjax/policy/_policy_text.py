"""Policies as plain data and as text: `params=float32,compute=float16,output=float32,loss_scaling=dynamic`.

    text  = key "=" value { "," key "=" value }
    value = a JSON value (true, null, 1024.0, "...", {...}, [...]), or else the text before the next comma

With only the keys `params`, `compute` and `output`, it is a string of `jmp`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
  """Returns a field's value as data for YAML and JSON: by its `to_dict`, if it has one; dtypes by name."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, tuple):
    # Pairs, since the first match wins and writers of YAML sort the keys of a mapping.
    return [[pattern, brief(override)] for pattern, override in value]
  return value.to_dict() if hasattr(value, "to_dict") else value


def brief(value: Any) -> Any:
  """Returns the same in short, by its `shorthand`: `dynamic`, `{"recipe": "delayed", "margin": 1}`."""
  if isinstance(value, tuple):
    return dict(plain(value))
  return value.shorthand() if hasattr(value, "shorthand") else plain(value)


def read_text(text: str) -> dict[str, Any]:
  """Returns keys and values of a text; `ValueError` for a part without `=`, or a repeated key."""
  values: dict[str, Any] = {}
  rest: str | None = text
  while rest is not None:
    key, equals, rest = (part.strip() for part in rest.partition("="))
    if not equals:
      raise ValueError(f"{key!r} in policy {text!r}: expected key=value")
    if key in values:
      raise ValueError(f"key {key!r} appears twice in policy {text!r}")
    values[key], rest = _read_value(rest)
  return values


def write_text(values: Mapping[str, Any]) -> str:
  """Returns the text that `read_text` reads back as these keys and values, which JSON can hold."""
  return ",".join(f"{key}={_write_value(value)}" for key, value in values.items())


def _read_value(text: str) -> tuple[Any, str | None]:
  """Returns the value at the start of a text, and the text after its comma; `None` if there is no comma."""
  with contextlib.suppress(ValueError):
    value, end = json.JSONDecoder().raw_decode(text)
    between, comma, rest = text[end:].partition(",")
    if not between.strip():
      return value, rest if comma else None
  word, comma, rest = text.partition(",")
  return word.strip(), rest if comma else None


def _write_value(value: object) -> str:
  is_read_back = isinstance(value, str) and _read_value(value) == (value, None)
  return str(value) if is_read_back else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
