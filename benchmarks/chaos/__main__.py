"""Faults of a month in an hour: python -m benchmarks.chaos --hours H, as `scripts/bench.py chaos` does."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["chaos", *sys.argv[1:]], prog="python -m benchmarks"))
