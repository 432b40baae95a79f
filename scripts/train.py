"""Trains the model of a YAML config: python scripts/train.py CONFIG.yaml [key=value ...]."""

from _checkout import run

if __name__ == "__main__":
  run("train")
