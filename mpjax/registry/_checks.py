"""The base of a config's sections: strict numbers, no unknown keys, errors of one line."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import pydantic

from mpjax._gone import instead
from mpjax.policy import Policy
from mpjax.registry._errors import ConfigError
from mpjax.registry._names import keys_meant


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


class Section(pydantic.BaseModel):
  """A mapping of known keys."""

  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


_T = TypeVar("_T")
_adapter: Any = functools.cache(pydantic.TypeAdapter)

# The expected value, by the first word of pydantic's name of the error.
_EXPECTED = {"int": "an integer", "float": "a number", "finite": "a finite number", "bool": "true or false"}
_EXPECTED |= {"string": "text"} | dict.fromkeys(("list", "tuple"), "a list")
_EXPECTED |= dict.fromkeys(("dict", "model"), "a mapping of keys")


def checked(schema: type[_T], data: object, where: str = "", owner: str = "") -> _T:
  """Makes a section, or a kind's keys, of plain data.

  Args:
    schema: the class of the section, or the typed dict of the keys.
    data: a mapping of its keys.
    where: the key of the section; empty for a whole config.
    owner: says whose keys these are, as in `model.kind=gpt`.

  Raises:
    ConfigError: for the first mistake; one line that names the key.
  """
  try:
    made: _T = _adapter(schema).validate_python(data)
  except pydantic.ValidationError as error:
    raise ConfigError(_describe(error, schema, where, owner)) from error
  return made


def dotted_keys(schema: type, prefix: str = "") -> Iterator[str]:
  """Yields the keys of a section, and those of the sections, kinds and policy in it: `train.steps`."""
  for name, annotation in _fields(schema).items():
    if _fields(annotation):
      yield from dotted_keys(annotation, f"{prefix}{name}.")
    else:
      yield prefix + name
    if name == "policy":
      yield from (f"policy.{f.name}" for f in dataclasses.fields(Policy) if f.name not in ("name", "reason"))
  kinds: Any = getattr(schema, "kinds", None)
  for kind in kinds.registered().values() if kinds else ():
    yield from dotted_keys(kind.keys, prefix)


def _fields(schema: Any) -> dict[str, Any]:
  """Returns the annotation of each key of a section or a typed dict; nothing for anything else."""
  if not isinstance(schema, type):
    return {}
  if issubclass(schema, Section):
    return {name: field.annotation for name, field in schema.model_fields.items()}
  return schema.__annotations__ if hasattr(schema, "__total__") else {}


def _describe(error: pydantic.ValidationError, schema: type, where: str, owner: str) -> str:
  # An unknown key may be a misspelt form of a missing one, so it comes first.
  first = min(error.errors(), key=lambda each: each["type"] == "missing")
  key = ".".join(map(str, ([where] if where else []) + [*first["loc"]]))
  value, message = first["input"], first["msg"].removeprefix("Value error, ")
  kind, _, fault = first["type"].partition("_")
  raised = first.get("ctx", {}).get("error")
  if isinstance(raised, ConfigError):  # from a kind's keys, and names one
    return str(raised)
  if kind == "missing":
    return f"missing key {key!r}" + (f": {owner} needs it" if owner else "")
  if kind == "extra":
    place, _, name = key.rpartition(".")
    if went := instead(name, place):
      return f"unknown key {key!r}{went}"
    at: Any = schema
    for part in first["loc"][:-1]:
      at = _fields(at).get(str(part))
    known = list(_fields(at))
    expected = f"expected one of {', '.join(known)}" if known else "it has none"
    meant = keys_meant(key, [*known, *(other for other in dotted_keys(schema) if other != key)])
    near = f"; did you mean {meant[0]!r}?" if meant else ""
    return f"unknown key {key!r}{' of ' * bool(owner)}{owner}: {expected}{near}"
  if kind in _EXPECTED and fault in ("type", "parsing", "from_float", "number"):
    message = f"expected {_EXPECTED[kind]}"
  else:
    number = "a number " if kind in ("greater", "less") else ""
    message = message.replace("Input should be ", f"expected {number}", 1)
    if kind == "literal":
      message += instead(str(value), str(first["loc"][-1]))
  if not key:
    return message
  if kind == "value" and re.match(r"\w+=", message):  # from a check of several keys
    return f"{key}.{message}"
  if kind != "value" or not isinstance(value, Mapping):  # else the message names several keys of it
    key += f"={value!r}"
  return f"{key}: {message}"
