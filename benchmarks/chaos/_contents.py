"""What a run leaves, to be compared bit for bit with what another one left; times are not compared."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.chaos._starts import checkpoints, ended, fork


def contents(out: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
  """Returns the records of a run by step, its summary, and digests of the arrays of its last checkpoint.

  Raises:
    RuntimeError: if they cannot be read.
  """
  file, log = scratch / "contents.json", scratch / "contents.log"
  log.unlink(missing_ok=True)

  def work() -> int:
    file.write_text(json.dumps(_contents(out)))
    return 0

  if status := ended(fork(work, log), timeout_s=120):
    raise RuntimeError(f"{out} cannot be read (status {status}): {log.read_text()[-1000:]}")
  found: dict[str, Any] = json.loads(file.read_text())
  return found


def difference(found: dict[str, Any], expected: dict[str, Any], destroyed: set[int]) -> str:
  """Returns how a run differs from its twin, but for records that were destroyed; empty for not at all."""
  for part in ("summary", "arrays", "step"):
    if found[part] != expected[part]:
      return f"{part}: {_first(found[part], expected[part])}"
  there, lost = found["records"], {str(step) for step in destroyed} - found["records"].keys()
  kept = {step: text for step, text in expected["records"].items() if step not in lost}
  return f"records: {_first(there, kept)}" if there != kept else ""


def _first(found: Any, expected: Any) -> str:
  if not isinstance(found, dict):
    return f"{found}, expected {expected}"
  keys = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
  return f"{len(keys)} differ, such as {keys[0]}: {found.get(keys[0])}, expected {expected.get(keys[0])}"


def _contents(out: pathlib.Path) -> dict[str, Any]:
  records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
  newest = checkpoints(out)[-1]
  return {
    "records": {str(record["step"]): json.dumps(_untimed(record)) for record in records},
    "summary": _untimed(json.loads((out / "summary.json").read_text())),
    "step": int(newest.name),
    "arrays": _arrays(newest / "state"),
  }


def _untimed(values: dict[str, Any]) -> dict[str, Any]:
  timed = ("step_time_s", "peak_memory_bytes", "time_s", "time_s_from_step")
  return {name: x for name, x in values.items() if name not in timed and not name.endswith("_per_s")}


def _arrays(folder: pathlib.Path) -> dict[str, str]:
  handler = ocp.PyTreeCheckpointHandler()
  tree = handler.metadata(folder)
  tree = getattr(tree, "tree", tree)
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  restored = handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
  leaves = jax.tree_util.tree_leaves_with_path(restored)
  return {jax.tree_util.keystr(path): _digest(np.asarray(leaf)) for path, leaf in leaves}


def _digest(array: np.ndarray) -> str:
  whole = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
  return f"{array.dtype}{list(array.shape)} {whole}"
