"""Agreement among the processes of a run: exchanged texts, and a check that all run the same code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
from typing import Any

import jax

from mpjax import _compat

_meetings = itertools.count()


def everyone(text: str, timeout_s: float) -> list[str]:
  """Returns the texts of all processes, in their order. Every process calls this and gets the same list.

  The texts go through the coordination service: no device takes part, and there is a time-out.

  Args:
    text: this process's text.
    timeout_s: how long to wait for the others, in seconds.

  Raises:
    TimeoutError: if another process did not call this in time.
  """
  client, process, count, _ = _compat.coordination()
  if client is None:
    return [text]
  key, milliseconds = f"mpjax/everyone/{next(_meetings)}", max(1, round(timeout_s * 1000))
  try:
    client.key_value_set(f"{key}/{process}", text)
    if process == 0:  # so that each of thousands of processes asks only once
      texts = [client.blocking_key_value_get(f"{key}/{i}", milliseconds) for i in range(count)]
      client.key_value_set(f"{key}/all", json.dumps(texts))
    found: list[str] = json.loads(client.blocking_key_value_get(f"{key}/all", milliseconds))
  except jax.errors.JaxRuntimeError as error:
    raise TimeoutError(f"another process did not come within {timeout_s:g} s") from error
  return found


# Packages that decide what a step computes.
_PACKAGES = ("mpjax", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide what a step computes."""
  return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def digest(text: str) -> str:
  """Returns a digest of a program's text."""
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def code_mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  """Returns an error text if process 0 and another one run different code; `None` if they do not.

  Args:
    first: versions or digests by name, in process 0.
    other: the same in another process.
    process: the other process's number.
  """
  differ = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
  if not differ:
    return None
  told = lambda name: f"{name}: {first.get(name)} in process 0, {other.get(name)} in process {process}"
  shown = list(map(told, differ))
  return f"the processes run different code ({'; '.join(shown[:3])}): give all of them the same"


def _version(name: str) -> str:
  if name == "mpjax":
    import mpjax

    return mpjax.__version__
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
