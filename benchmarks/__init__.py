"""Benchmarks: a folder for each suite; `python -m benchmarks SUITE` runs one, `results/` holds reports."""
