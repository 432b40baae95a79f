"""The command of the benchmarks."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import _quick_compile as quick

ROOT = pathlib.Path(__file__).parents[2]


def bench(*arguments, timeout=300):
  command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"} | quick.environment(1)
  return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "status", "says"),
  [
    (["--help"], 0, "quality"),
    (["no-such-suite"], 2, "invalid choice"),
    (["quality", "--json", "/no/such/folder/out.json"], 2, "there is no folder /no/such/folder"),
  ],
)
def test_the_command_line(arguments, status, says):
  done = bench(*arguments)
  assert done.returncode == status
  assert says in done.stdout + done.stderr
