"""`mpjax export`: the parameters of a run's checkpoint as safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpjax.cli._config_arguments import add_plugin
from mpjax.cli._exit_status import guarded
from mpjax.train import ConfigError, export_run, load_plugins
from mpjax.train._export import export_text


def run(arguments: Sequence[str], prog: str) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog=prog,
    description="Write the parameters of a run's checkpoint as safetensors.",
    epilog=f"example: {prog} runs/x dtype=bfloat16",
  )
  parser.add_argument("directory", help="a run directory")
  parser.add_argument("options", nargs="*", metavar="key=value", help="dtype=, step=best|latest|N, out=FILE")
  add_plugin(parser)
  options = parser.parse_intermixed_args(list(arguments))

  def export() -> None:
    load_plugins(options.plugin)
    pairs = dict(option.partition("=")[::2] for option in options.options)
    unknown = pairs.keys() - {"dtype", "step", "out"}
    if unknown:
      raise ConfigError(f"unknown key {min(unknown)!r}: expected dtype, step or out")
    print(export_text(export_run(options.directory, **pairs)))

  return guarded(export)
