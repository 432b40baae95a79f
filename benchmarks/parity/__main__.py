"""Compares programs and plans of two checkouts: python -m benchmarks.parity, `scripts/bench.py parity`."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["parity", *sys.argv[1:]], prog="python -m benchmarks"))
