"""Says what runs in which dtype, and why: python scripts/explain.py CONFIG.yaml [key=value ...]."""

from _checkout import run

if __name__ == "__main__":
  run("explain")
