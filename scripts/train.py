"""Trains what a YAML config says: python scripts/train.py CONFIG.yaml [key=value ...]."""

import sys

import mpjax.train.cli

if __name__ == "__main__":
  sys.exit(mpjax.train.cli.train(sys.argv[1:]))
