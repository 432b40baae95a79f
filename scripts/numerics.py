"""Shows what a policy does to the numbers: python scripts/numerics.py CONFIG.yaml [checkpoint=runs/x]."""

import pathlib
import sys

# The checkout that this file is in, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mpjax.cli import _numerics_command

if __name__ == "__main__":
  sys.exit(_numerics_command.numerics(sys.argv[1:]))
