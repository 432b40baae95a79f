"""Finds the cheapest policy that is good enough: python scripts/tune.py CONFIG.yaml [target=h200]."""

from _checkout import run

if __name__ == "__main__":
  run("tune")
