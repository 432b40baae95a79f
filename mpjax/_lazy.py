"""`flax.nnx`, imported at its first use.

An import with mpjax would double the time of `import mpjax`, also for users without an nnx module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from flax import nnx as nnx
else:

  class _Nnx:
    def __getattr__(self, name):
      return getattr(importlib.import_module("flax.nnx"), name)

  nnx = _Nnx()
