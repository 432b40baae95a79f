"""The base of a config's sections: strict numbers, no unknown keys, errors of one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from mpjax.dtypes import did_you_mean


def _no_bool(value: object) -> object:
  if isinstance(value, bool):
    raise ValueError(f"expected a number, not {value} (YAML reads on, off, yes and no as booleans)")
  return value


# Steps, sizes and counters are int32 in JAX; PRNG seeds are uint32.
INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1
_Whole = Annotated[int, pydantic.BeforeValidator(_no_bool)]
Int = Annotated[_Whole, pydantic.Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Seed = Annotated[_Whole, pydantic.Field(ge=0, le=UINT32_MAX)]
Float = Annotated[float, pydantic.BeforeValidator(_no_bool), pydantic.Field(allow_inf_nan=False)]
Positive = Annotated[Int, pydantic.Field(gt=0)]
Natural = Annotated[Int, pydantic.Field(ge=0)]


# The expected value, by the first word of pydantic's name of the error.
_EXPECTED = {
  "int": "an integer",
  "float": "a number",
  "finite": "a finite number",
  "bool": "true or false",
  "string": "text",
  "list": "a list",
  "tuple": "a list",
  "dict": "a mapping of keys",
}


class Section(pydantic.BaseModel):
  """A mapping of known keys."""

  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _require_mapping(cls, value: object) -> object:
    if not isinstance(value, (Mapping, cls)):
      keys = ", ".join(list(cls.model_fields)[:3])
      raise ValueError(f"expected a mapping of keys, such as {keys}")
    return value


def describe(error: Mapping[str, Any], loc: Sequence[object]) -> str:
  """Describes pydantic's error about the value at `loc` in one line."""
  key = ".".join(map(str, loc))
  if error["type"] == "missing":
    return f"missing key {key!r}"
  if error["type"] == "literal_error":
    words = [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]
    value = error["input"]
    return f"unknown {key} {value!r}: expected one of {', '.join(words)}" + did_you_mean(str(value), words)
  message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
  kind, _, fault = error["type"].partition("_")
  if error["type"].startswith(("greater_than", "less_than")):
    message = f"a number {message}"
  elif kind in _EXPECTED and fault in ("type", "parsing", "from_float", "number"):
    message = f"expected {_EXPECTED[kind]}"
  if not message.startswith("expected ") and "Input should be " in error["msg"]:
    message = f"expected {message}"
  return f"{key}={error['input']!r}: {message}" if key else message
