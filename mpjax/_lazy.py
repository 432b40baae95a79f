"""What is imported at its first use: the public names of packages, and `flax.nnx`.

So a program waits only for what it uses, and `mpjax --help` does not wait for JAX. nnx would double the time
of `import mpjax`, also for users without an nnx module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from flax import nnx
else:

  class _Nnx:
    def __getattr__(self, name):
      return getattr(importlib.import_module("flax.nnx"), name)

  nnx = _Nnx()

__all__ = ["import_name", "nnx"]


def import_name(package: str, name: str) -> Any:
  """Imports a public name of a package from where its `if TYPE_CHECKING:` block imports it.

  The package has the name from then on.
  """
  value = getattr(importlib.import_module(_module_of(package)[name]), name)
  setattr(importlib.import_module(package), name, value)
  return value


@functools.cache
def _module_of(package: str) -> dict[str, str]:
  """Returns the module of each name that a package imports for type checkers."""
  import ast

  loader: Any = importlib.import_module(package).__loader__
  block = next(part for part in ast.parse(loader.get_source(package)).body if isinstance(part, ast.If))
  imports = [part for part in block.body if isinstance(part, ast.ImportFrom)]
  return {each.name: str(part.module) for part in imports for each in part.names}
