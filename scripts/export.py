"""Exports a run: python scripts/export.py RUN_DIR [dtype=bfloat16] [step=best] [out=FILE]."""

from _checkout import run

if __name__ == "__main__":
  run("export")
