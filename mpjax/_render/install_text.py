"""Says how to install an extra of mpjax."""

from __future__ import annotations

import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def pip_install(extras: str) -> str:
  """Returns the command that installs extras of mpjax, such as `plan` or `train,plan`."""
  if (_ROOT / "pyproject.toml").is_file():
    folder = "." if pathlib.Path.cwd() == _ROOT else str(_ROOT)
    return f'pip install -e "{folder}[{extras}]"'
  return f'pip install "mpjax[{extras}]", or in a checkout pip install -e ".[{extras}]"'
