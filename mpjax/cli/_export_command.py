"""`mpjax export`: writes the parameters of a run's checkpoint as safetensors."""

from __future__ import annotations

import argparse

from mpjax.cli._commands import COMMANDS
from mpjax.train import ConfigError, export_run, load_plugins
from mpjax.train._export import export_text


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  load_plugins(options.plugin)
  if options.overrides:
    unknown = options.overrides[0].partition("=")[0]
    raise ConfigError(f"unknown key {unknown!r}: expected {', '.join(COMMANDS['export'].keys)}")
  print(export_text(export_run(options.directory, **options.own)))
