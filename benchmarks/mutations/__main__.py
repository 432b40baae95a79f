"""Small faults, and a test that finds each: python -m benchmarks.mutations, `scripts/bench.py mutations`."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["mutations", *sys.argv[1:]], prog="python -m benchmarks"))
