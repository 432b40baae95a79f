"""`python -m mpjax`: the commands of mpjax."""

import sys

from mpjax.cli import main

if __name__ == "__main__":
  sys.exit(main())
