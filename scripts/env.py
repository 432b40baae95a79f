"""Says which versions, devices and flags are here: python scripts/env.py [--json]."""

from _checkout import run

if __name__ == "__main__":
  run("env")
