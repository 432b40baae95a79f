"""Exports a run's parameters: python scripts/export.py RUN_DIR [dtype=bfloat16] [step=best] [out=FILE]."""

import sys

import mpjax.train.cli

if __name__ == "__main__":
  sys.exit(mpjax.train.cli.export(sys.argv[1:]))
