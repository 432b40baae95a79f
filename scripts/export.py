"""Exports a run: python scripts/export.py RUN_DIR [dtype=bfloat16] [step=best] [out=FILE]."""

import pathlib
import sys

# The checkout that this file is in, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mpjax.cli import _commands

if __name__ == "__main__":
  sys.exit(_commands.export(sys.argv[1:]))
