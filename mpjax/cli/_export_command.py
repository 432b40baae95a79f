"""`mpjax export`: writes the parameters of a run's checkpoint as safetensors."""

from __future__ import annotations

import argparse

from mpjax.cli._parsers import KEYS
from mpjax.train import ConfigError, export_run, load_plugins
from mpjax.train._export import export_text


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  load_plugins(options.plugin)
  pairs = dict(option.partition("=")[::2] for option in options.overrides)
  unknown = pairs.keys() - set(KEYS["export"])
  if unknown:
    raise ConfigError(f"unknown key {min(unknown)!r}: expected dtype, step, weights or out")
  print(export_text(export_run(options.directory, **pairs)))
