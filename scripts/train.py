"""Trains what a YAML config says: python scripts/train.py CONFIG.yaml [key=value ...]."""

from _checkout import run

if __name__ == "__main__":
  run("train")
