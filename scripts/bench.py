"""Measures mpjax beside what one would use instead: python scripts/bench.py SUITE [options] [--json FILE]."""

import pathlib
import sys

# The checkout that this file is in, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.__main__ import main

if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
