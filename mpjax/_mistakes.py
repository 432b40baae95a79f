"""Mistakes of a user in a config or in data: errors of one line. Does not import JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ConfigError(ValueError):
  """The config is wrong: one line that names the key, the value and what to write instead."""

  exit_status = 2


class DataError(ValueError):
  """Data is missing or cannot be used: one line that names it."""

  exit_status = 2


@contextlib.contextmanager
def config_errors(before: str = "") -> Iterator[None]:
  """Turns a `ValueError` of its block into a `ConfigError` that begins with a text, such as `mesh.`."""
  try:
    yield
  except (ConfigError, DataError):
    raise
  except ValueError as error:
    raise ConfigError(f"{before}{error}") from error
