"""Plans what a config costs on a device: python scripts/plan.py CONFIG.yaml [policy=a,b] [target=h200]."""

import pathlib
import sys

# The checkout that this file is in, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mpjax.cli import _plan_command

if __name__ == "__main__":
  sys.exit(_plan_command.plan(sys.argv[1:]))
