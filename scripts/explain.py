"""Explains what runs in which dtype, and why: python scripts/explain.py CONFIG.yaml [key=value ...]."""

import pathlib
import sys

# The checkout that this file is in, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mpjax.cli import _commands

if __name__ == "__main__":
  sys.exit(_commands.explain(sys.argv[1:]))
