"""The errors of a config and of its data."""

from __future__ import annotations


class ConfigError(ValueError):
  """The config is wrong: one line that names the key, the value and what to write instead."""

  exit_status = 2


class DataError(ValueError):
  """Data is missing or cannot be used: one line that names it."""

  exit_status = 2
