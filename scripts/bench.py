"""Measures mpjax and its alternatives: python scripts/bench.py SUITE [options] [--json FILE]."""

from _checkout import run

if __name__ == "__main__":
  run("bench")
