"""`flax.nnx`, imported when something of it is first used.

With it `import mpjax` would take twice as long, for those who have no module of it, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from flax import nnx
else:

  class _Nnx:
    def __getattr__(self, name):
      return getattr(importlib.import_module("flax.nnx"), name)

  nnx = _Nnx()

__all__ = ["nnx"]
