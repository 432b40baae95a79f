"""Topologies of devices that need not be there, for programs that a suite compiles itself."""

from __future__ import annotations

import os
import sys
from typing import Any

# Read when the compilers start: a described device is not a backend.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
if "cuda" in sys.argv:
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

from jax.experimental import topologies

from mpjax.planner import get_target


def described(target: str) -> Any:
  """A topology: of `tpu` TPUs v5e, of `cuda` an H200."""
  if target == "tpu":
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  h200 = get_target("h200")
  return topologies.get_topology_desc(
    platform="cuda", topology=h200.topology, target_config=h200.gpu_description()
  )
