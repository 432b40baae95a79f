"""Checkpoints of a run: saving, checksums, and reading back what is whole."""
