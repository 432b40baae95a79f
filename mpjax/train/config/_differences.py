"""How two configs differ: those of a run's processes, and those of a run and its resume."""

from __future__ import annotations

from typing import Any

from mpjax._gone import without_old_keys

# Keys that may differ between processes.
_OWN = frozenset({"distributed", "train.checkpoint_wait"})
# Keys that may change when a run resumes. Only a mesh changes what a step computes: its rounding.
_FREE = _OWN | {
  "out",
  "numerics",
  "mesh",
  "data.workers",
  "train.log_every",
  "train.eval_every",
  "train.checkpoint_every",
  "train.keep_checkpoints",
  "train.max_skips",
  "train.export",
  "train.export_dtype",
  "train.profile_steps",
  "train.trackers",
}
# Keys that may change when a run resumes with more steps.
_GROWING = {"train.steps", "optimizer.schedule_steps"}


def mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  """Returns an error text if configs, code or data differ between process 0 and another; otherwise `None`."""
  found = _differences(first, other, "in process 0", f"in process {process}", _OWN)
  if not found:
    return None
  return f"the processes differ ({'; '.join(found[:3])}): give all the same config, code and data"


def run_mismatch(theirs: dict[str, Any], ours: dict[str, Any], *, may_grow: bool = True) -> str | None:
  """Says how the configs of two runs differ in the keys that a run keeps; `None` if they do not.

  Args:
    theirs: a config as plain data.
    ours: another config.
    may_grow: whether the number of steps may differ.
  """
  theirs, ours = without_old_keys(theirs), without_old_keys(ours)
  found = _differences(theirs, ours, "there", "here", _FREE | _GROWING if may_grow else _FREE)
  return "; ".join([*found[:3], "..."] if len(found) > 3 else found) or None


def _differences(
  theirs: object, ours: object, there: str, here: str, free: frozenset[str], key: str = ""
) -> list[str]:
  """Returns a line for each difference between two configs, or between their parts at `key`.

  `there` and `here` say for a person where each config is; keys in `free` may differ.
  """
  if not (isinstance(theirs, dict) and isinstance(ours, dict)):
    return [] if theirs == ours else [f"{key}: {_short(theirs)} {there}, {_short(ours)} {here}"]
  found = []
  for name in sorted(theirs.keys() | ours.keys()):
    path = f"{key}.{name}" if key else name
    if path not in free:
      found += _differences(theirs.get(name), ours.get(name), there, here, free, path)
  return found


def _short(value: object) -> str:
  """Returns a value as text, and a mapping by at most its beginning."""
  text = repr(value)
  return f"{text[:60]}...}}" if isinstance(value, dict) and len(text) > 60 else text
