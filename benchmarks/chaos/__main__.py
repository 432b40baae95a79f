"""The soak of `scripts/bench.py chaos`, as python -m benchmarks.chaos."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
  sys.exit(main(["chaos", *sys.argv[1:]], prog="python -m benchmarks"))
