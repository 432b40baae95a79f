"""Shows what a policy does to the numbers: python scripts/numerics.py CONFIG.yaml [checkpoint=runs/x]."""

from _checkout import run

if __name__ == "__main__":
  run("numerics")
