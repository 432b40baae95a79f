"""The peak memory of a run."""

from __future__ import annotations

import sys

import jax


def peak_memory() -> int | None:
  """Returns the peak bytes in use on the first device, or on a CPU by this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  if jax.default_backend() != "cpu":
    return None
  try:
    import resource
  except ImportError:  # not on Windows
    return None
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
