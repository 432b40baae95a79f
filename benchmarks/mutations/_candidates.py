"""Which tests run a line that a fault changes, the cheapest and nearest first."""

from __future__ import annotations

import collections
import functools
import json
import math
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.mutations._faults import Fault, Place

_SLOW_S = (2.0, 15.0)  # tests of so many seconds come later, and last


class Candidate(NamedTuple):
  """A test that may find a fault."""

  test: str
  seconds: float
  lines: int  # of mpjax that it runs in all: a test of few is about them
  far: int = 0  # 1: it only runs the fault's file, 2: only its folder

  @property
  def file(self) -> str:
    """The file that it is in."""
    return self.test.partition("::")[0]

  @property
  def function(self) -> str:
    """Its name without the parameters."""
    return self.test.partition("[")[0]


def candidates(maps: Iterable[pathlib.Path], places: Mapping[Fault, Place]) -> dict[Fault, list[Candidate]]:
  """Returns the tests for each fault, in the order in which they are worth trying.

  Where a line runs at import, or in no test, they are those that run the same file or folder.

  Args:
    maps: files that `_lines.py` has written.
    places: of the faults.
  """
  found: dict[Fault, list[Candidate]] = {fault: [] for fault in places}
  for path in maps:
    with path.open() as records:
      for record in map(json.loads, records):
        lines: dict[str, list[int]] = record["lines"]
        whole = sum(map(len, lines.values()))
        folders = {name.rpartition("/")[0] for name in lines}
        for fault, place in places.items():
          runs_line = not place.lines.isdisjoint(lines.get(fault.file, ()))
          far = 0 if runs_line else 1 if fault.file in lines else 2
          if far < 2 or fault.file.rpartition("/")[0] in folders:
            found[fault].append(Candidate(record["test"], record["seconds"], whole, far))
  for fault, tests in found.items():
    if not places[fault].at_import and not all(test.far for test in tests):
      tests[:] = [test for test in tests if not test.far]
  return {fault: _ordered(fault, tests) for fault, tests in found.items()}


def _ordered(fault: Fault, tests: Sequence[Candidate]) -> list[Candidate]:
  """Sorts tests by the words that they share with the fault; further cases of a function are worth less."""
  package = pathlib.PurePath(fault.file).parts[1:-1]
  asked = _words(f"{pathlib.PurePath(fault.file).stem} {fault.name} {fault.loses}")
  shared = {test.test: _words(test.test) & asked for test in tests}
  among = collections.Counter(word for words in shared.values() for word in words)

  cases: collections.Counter[str] = collections.Counter()
  turn: dict[str, int] = {}
  for test in sorted(tests, key=lambda t: (-len(shared[t.test]), zlib.crc32(t.test.encode()))):
    turn[test.test] = cases[test.function]
    cases[test.function] += 1

  def key(test: Candidate) -> tuple[float, ...]:
    near = test.file.startswith("/".join(("tests", *package[:1])))
    late = sum(test.seconds > limit for limit in _SLOW_S)
    alike = sum(math.log(len(tests) / among[word]) for word in shared[test.test])
    worth = (alike + 2 * near) * 0.8 ** turn[test.test]
    return late, test.far, -worth, turn[test.test], test.lines, test.seconds

  return sorted(tests, key=key)


@functools.cache
def _words(text: str) -> frozenset[str]:
  """Returns what a text or the name of a test is about, in the singular."""
  return frozenset(word.rstrip("s") for word in re.findall(r"[a-z0-9]{3,}", text.lower()))
