"""Damage to the files of a run that stands still."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.chaos._starts import checkpoints


class Damage(NamedTuple):
  """What was done to a run directory.

  Attributes:
    kind: of damage.
    detail: what exactly, for the report.
    destroyed: steps whose records are gone.
    mend: undoes it, where no run can go on by itself; else `None`.
  """

  kind: str
  detail: str
  destroyed: frozenset[int] = frozenset()
  mend: Callable[[], object] | None = None


METRICS = ("a blank line", "a note", "a byte damaged", "a line halved", "cut short", "deleted")


def damage(out: pathlib.Path, chance: random.Random) -> Damage | None:
  """Damages a run directory in some way; `None` where that way finds nothing to damage."""
  return chance.choice(
    (_checkpoint, _checkpoint, _checkpoint_of_another_step, damage_metrics, damage_metrics, _config)
  )(out, chance)


def damage_summary(out: pathlib.Path, chance: random.Random) -> Damage:
  """Damages the summary of a finished run."""
  file = out / "summary.json"
  way = chance.choice(("deleted", "emptied", "halved", "[]", "{}", '{"steps": 3}', "\0" * 100))
  if way in WAYS:
    WAYS[way](file, chance)
  else:
    file.write_text(way)
  return Damage("summary.json damaged", f"{way[:20]!r}")


def _checkpoint(out: pathlib.Path, chance: random.Random) -> Damage | None:
  """Damages a file of the newest checkpoint, where there is one before it."""
  *others, newest = checkpoints(out) or [out]
  if not others:
    return None
  file = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
  way = chance.choice(tuple(WAYS))
  WAYS[way](file, chance)
  return Damage("checkpoint file damaged", f"{file.relative_to(newest)} {way}")


def _checkpoint_of_another_step(out: pathlib.Path, chance: random.Random) -> Damage | None:
  *others, newest = checkpoints(out) or [out]
  if not others:
    return None
  there = newest.with_name(str(int(newest.name) + chance.randrange(1, 9)))
  if chance.random() < 0.5:
    newest.rename(there)
  else:
    shutil.copytree(others[-1], there)
  return Damage("checkpoint under another step's name", f"{newest.name} as {there.name}")


def damage_metrics(out: pathlib.Path, chance: random.Random, way: str | None = None) -> Damage | None:
  """Damages lines of the metrics in some way of `METRICS`: each loses as many records as it says."""
  file = out / "metrics.jsonl"
  lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
  if not lines:
    return None
  at, lost = chance.randrange(len(lines)), range(0)
  way = way or chance.choice(METRICS)
  if way == "a blank line":
    lines.insert(at, b"\n")
  elif way == "a note":
    lines.insert(at, b"restarted on Monday\n")
  elif way == "a byte damaged":
    lines[at], lost = b"\xff" + lines[at][1:], range(at, at + 1)
  elif way == "a line halved":
    lines[at], lost = lines[at][: len(lines[at]) // 2] + b"\n", range(at, at + 1)
  else:
    at = at if way == "cut short" else 0
    lost = range(at, len(lines))
  steps = frozenset(_step(line) for i, line in enumerate(file.read_bytes().splitlines()) if i in lost)
  if way == "deleted":
    file.unlink()
  else:
    file.write_bytes(b"".join(lines[:at] if way == "cut short" else lines))
  return Damage("metrics.jsonl damaged", f"{way} at line {at + 1}", steps - {0})


def _step(line: bytes) -> int:
  word = line.partition(b'{"step": ')[2].partition(b",")[0]
  return int(word) if word.isdigit() else 0


def _config(out: pathlib.Path, chance: random.Random) -> Damage | None:
  """Damages the config: no run goes on then, and none is lost."""
  file = out / "config.yaml"
  if not checkpoints(out):
    return None  # a directory in which nothing has been saved is begun anew
  content = file.read_bytes()
  way = chance.choice(("deleted", "emptied", "halved"))
  WAYS[way](file, chance)
  return Damage("config.yaml damaged", way, mend=lambda: file.write_bytes(content))


def _flip(file: pathlib.Path, chance: random.Random) -> None:
  content = bytearray(file.read_bytes())
  if content:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
  file.write_bytes(content)


def _halve(file: pathlib.Path, chance: random.Random) -> None:
  os.truncate(file, file.stat().st_size // 2)


WAYS: dict[str, Callable[[pathlib.Path, random.Random], object]] = {
  "deleted": lambda file, chance: file.unlink(),
  "emptied": lambda file, chance: os.truncate(file, 0),
  "halved": _halve,
  "with a bit flipped": _flip,
}
