"""How an extra of mpjax is installed: from the checkout that runs, or beside the installed package."""

from __future__ import annotations

import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def pip_install(extras: str) -> str:
  """Returns the command that installs extras of mpjax, such as `plan` or `train,plan`."""
  if not (_ROOT / "pyproject.toml").is_file():
    return f'pip install "mpjax[{extras}]"'
  folder = "." if pathlib.Path.cwd() == _ROOT else str(_ROOT)
  return f'pip install -e "{folder}[{extras}]"'
