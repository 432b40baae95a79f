"""What the processes of a run have to have alike: versions, plug-ins and the program of the step."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from typing import Any

# Packages that decide what a step computes.
_PACKAGES = ("mpjax", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide what a step computes."""
  return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def digest(text: str) -> str:
  """Returns what tells a program from others."""
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def code_mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  """Returns what is wrong if process 0 runs this code and another one that; `None` for nothing.

  Args:
    first: names of parts and their versions or digests.
    other: the same of another process.
    process: its number.
  """
  differ = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
  if not differ:
    return None
  told = lambda name: f"{name}: {first.get(name)} in process 0, {other.get(name)} in process {process}"
  shown = list(map(told, differ))
  return f"the processes run different code ({'; '.join(shown[:3])}): give all of them the same"


def _version(name: str) -> str:
  if name == "mpjax":
    import mpjax

    return mpjax.__version__
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
