"""Shows versions, devices and flags: python scripts/env.py [--json]."""

from _checkout import run

if __name__ == "__main__":
  run("env")
