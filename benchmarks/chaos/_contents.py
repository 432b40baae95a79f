"""What a run directory holds, to be compared bit for bit with what another one holds; times are left out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def contents(run: pathlib.Path) -> dict[str, str]:
  """The records and the summary of a finished run, and digests of the arrays of its last checkpoint."""
  found = {}
  for line in (run / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    found[f"record {record['step']}"] = json.dumps(_untimed(record))
  for name, value in _untimed(json.loads((run / "summary.json").read_text())).items():
    found[f"summary {name}"] = json.dumps(value)
  newest = checkpoints(run)[-1]
  handler = ocp.PyTreeCheckpointHandler()
  as_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
  wanted = jax.tree.map(as_numpy, handler.metadata(newest / "state").tree)
  arrays = handler.restore(newest / "state", args=ocp.args.PyTreeRestore(restore_args=wanted))
  for path, array in jax.tree_util.tree_leaves_with_path(arrays):
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    found[f"checkpoint {newest.name} {name}"] = f"{array.dtype}{list(array.shape)} {digest}"
  return found


def differences(
  found: dict[str, str], expected: dict[str, str], destroyed: Collection[int] = ()
) -> list[str]:
  """How the contents of two runs differ, a line for each; records of destroyed steps may be missing."""
  forgiven = {f"record {step}" for step in destroyed} - (found.keys() & expected.keys())
  keys = sorted((found.keys() | expected.keys()) - forgiven)
  both = [(key, found.get(key), expected.get(key)) for key in keys]
  return [f"{key}: {one}, expected {other}" for key, one, other in both if one != other]


def _untimed(values: dict[str, Any]) -> dict[str, Any]:
  timed = ("step_time_s", "peak_memory_bytes", "time_s", "time_s_from_step")
  return {name: x for name, x in values.items() if name not in timed and not name.endswith("_per_s")}


def checkpoints(run: pathlib.Path) -> list[pathlib.Path]:
  """The complete checkpoints of a run directory, oldest first."""
  found = [path for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
  return sorted(found, key=lambda path: int(path.name))


def steps(run: pathlib.Path) -> set[int]:
  """The steps whose records can be read; 0 stands for the start of the run."""
  found, metrics = {0}, run / "metrics.jsonl"
  for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
    with contextlib.suppress(ValueError):  # damaged, or being written
      found.add(json.loads(line)["step"])
  return found
