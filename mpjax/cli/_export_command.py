"""`mpjax export`: writes the parameters of a run's checkpoint as safetensors."""

from __future__ import annotations

import argparse

from mpjax.train import export_run, load_plugins
from mpjax.train._export import export_text


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  load_plugins(options.plugin)
  print(export_text(export_run(options.directory, **options.own)))
