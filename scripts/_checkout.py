"""Runs a command of this checkout, also if mpjax is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mpjax.cli import run_command


def run(command: str) -> None:
  """Runs `mpjax COMMAND` with this script's arguments and exits with its status."""
  sys.exit(run_command(command, sys.argv[1:], pathlib.Path(sys.argv[0]).name))
