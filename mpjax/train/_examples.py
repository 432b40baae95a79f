"""The example configs that come with mpjax, by name."""

from __future__ import annotations

import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]
# A wheel has them inside the package, a checkout next to it.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def examples() -> dict[str, pathlib.Path]:
  """Returns the file of each example, by name."""
  folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
  return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.yaml"))}
