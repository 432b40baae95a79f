"""Says what a config costs on a device: python scripts/plan.py CONFIG.yaml [policy=a,b] [target=h200]."""

from _checkout import run

if __name__ == "__main__":
  run("plan")
