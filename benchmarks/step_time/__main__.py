"""Predicted, published and measured step times: python -m benchmarks.step_time, `scripts/bench.py step_time`."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["step_time", *sys.argv[1:]], prog="python -m benchmarks"))
