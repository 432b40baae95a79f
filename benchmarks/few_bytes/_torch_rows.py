"""Updates of PyTorch's optimisers; run by an interpreter that has torch, and need not have JAX."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

from benchmarks._worker import serve


def start(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
  """Returns the versions, and what times an update."""
  import torch

  path, _, option = task["name"].partition(", ")
  where, _, name = path.rpartition(".")
  make = getattr(importlib.import_module(where), name)
  torch.manual_seed(0)
  params = [torch.nn.Parameter(torch.randn(*task["shape"])) for _ in range(task["leaves"])]
  for p in params:
    p.grad = 1e-3 * torch.randn_like(p)
  optimizer = make(params, lr=1e-3, weight_decay=1e-4, **({option: True} if option else {}))

  def update() -> dict[str, Any]:
    begin = time.perf_counter()
    optimizer.step()
    return {"seconds": time.perf_counter() - begin}

  packages = {"torch", path.split(".")[0]}
  return {"versions": {package: importlib.metadata.version(package) for package in sorted(packages)}}, update


if __name__ == "__main__":
  serve(start)
