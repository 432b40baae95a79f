"""Which tests run a line that a fault changes, the cheapest and nearest first."""

from __future__ import annotations

import ast
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
  hops: int = -1  # where it does not run the line: imports between the fault's file and one that it runs

  @property
  def file(self) -> str:
    """The file that it is in."""
    return self.test.partition("::")[0]

  @property
  def function(self) -> str:
    """Its name without the parameters."""
    return self.test.partition("[")[0]


def candidates(
  maps: Iterable[pathlib.Path], places: Mapping[Fault, Place], root: pathlib.Path
) -> dict[Fault, list[Candidate]]:
  """Returns the tests for each fault, in the order in which they are worth trying.

  Where a line runs at import, or in no test, they are those that run the same file or one that imports it.

  Args:
    maps: files that `_lines.py` has written.
    places: of the faults.
    root: of the checkout.
  """
  found: dict[Fault, list[Candidate]] = {fault: [] for fault in places}
  hops = {file: _importers(file, root) for file in {fault.file for fault in places}}
  for path in maps:
    with path.open() as records:
      for record in map(json.loads, records):
        lines: dict[str, list[int]] = record["lines"]
        whole = sum(map(len, lines.values()))
        near = {
          file: min((far[name] for name in lines if name in far), default=None) for file, far in hops.items()
        }
        for fault, place in places.items():
          far = -1 if not place.lines.isdisjoint(lines.get(fault.file, ())) else near[fault.file]
          if far is not None:
            found[fault].append(Candidate(record["test"], record["seconds"], whole, far))
  for fault, tests in found.items():
    if not places[fault].at_import and any(test.hops < 0 for test in tests):
      tests[:] = [test for test in tests if test.hops < 0]
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
    return late, test.hops, -worth, turn[test.test], test.lines, test.seconds

  return sorted(tests, key=key)


@functools.cache
def _words(text: str) -> frozenset[str]:
  """Returns what a text or the name of a test is about, in the singular."""
  return frozenset(word.rstrip("s") for word in re.findall(r"[a-z0-9]{3,}", text.lower()))


@functools.cache
def _readers(root: pathlib.Path) -> Mapping[str, set[str]]:
  """Returns which files of mpjax import each, by themselves."""
  readers: dict[str, set[str]] = {}
  for path in sorted((root / "mpjax").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
      else:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      for module in modules:
        place = module.replace(".", "/")
        for found in (f"{place}.py", f"{place}/__init__.py"):
          readers.setdefault(found, set()).add(path.relative_to(root).as_posix())
  return readers


def _importers(file: str, root: pathlib.Path) -> dict[str, int]:
  """Returns how many imports lead to a file, for every file that imports it, through others or not."""
  hops, waiting = {file: 0}, [file]
  for current in waiting:
    for reader in _readers(root).get(current, set()) - hops.keys():
      hops[reader] = hops[current] + 1
      waiting.append(reader)
  return hops
