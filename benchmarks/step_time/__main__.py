"""Times of training steps: python -m benchmarks.step_time, as `scripts/bench.py step_time` does."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["step_time", *sys.argv[1:]], prog="python -m benchmarks"))
