"""Small faults in mpjax, each in a copy of a checkout, against the tests that run the changed line.

    pytest -n 2 -p benchmarks.mutations._lines --lines map.jsonl           # which test runs which line
    python -m benchmarks.mutations --map map_gw0.jsonl map_gw1.jsonl [--tests DIR] [--only NAME ...]
    python -m benchmarks.mutations --table before.json after.json --json benchmarks/results/mutations.json

Of the tests that run a fault's line the nearest and cheapest come first, until one fails: the fault is found
then, if that test passes without it. A fault that none finds in `--most` tests or `--seconds` survives. A
test that hangs, an interpreter that crashes, and tests that cannot be imported find a fault, too. Tests
that are slow or aot are among them with `--all` in both commands.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks._runner import markdown, origin
from benchmarks.mutations import _forks
from benchmarks.mutations._candidates import Candidate, candidates
from benchmarks.mutations._faults import Fault, place_of, read_faults

_PARTS = (0, 8, 32, None)  # of the tests: some are tried before the others are collected
_OUTSIDE = "slow or aot"  # marks of tests that only --all runs
_ANY = ("-m", "slow or not slow")  # all tests: without -m some suites leave out those
_FOUND = {"failed", "collection", "timeout", "crash"}
_HEAD = ("command", "commit", "date", "device", "versions")
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--tests", type=pathlib.Path, default=_ROOT, metavar="DIR", help="a checkout: its tests"
  )
  parser.add_argument(
    "--map", type=pathlib.Path, nargs="+", metavar="FILE", help="which test runs which line"
  )
  parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
  parser.add_argument("--all", action="store_true", help=f"tests that are {_OUTSIDE}, too")
  parser.add_argument("--most", type=int, default=80, help="tests for a fault")
  parser.add_argument("--seconds", type=float, default=150.0, help="for a fault")
  parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
  parser.add_argument("--table", type=pathlib.Path, nargs=2, metavar="FILE", help="show two reports")


class Try(NamedTuple):
  """A fault and the tests to try; and what came of it, as it stands in the report."""

  fault: Fault
  tests: list[Candidate]
  most: int
  seconds: float
  options: tuple[str, ...]


def run(options: argparse.Namespace) -> dict[str, Any]:
  if options.table is not None:
    before, after = (json.loads(path.read_text()) for path in options.table)
    report = {key: after[key] for key in _HEAD} | {"before": before, "after": after}
    print(table(report))
    return report
  faults = [fault for fault in read_faults() if options.only is None or fault.name in options.only]
  if unknown := {*(options.only or ())} - {fault.name for fault in faults}:
    sys.exit(f"--only {min(unknown)}: no such fault in faults.toml")
  if not options.map:
    sys.exit("--map: expected the files that `pytest -p benchmarks.mutations._lines --lines FILE` writes")
  checkout = options.tests.resolve()
  begun = time.monotonic()
  tests = candidates(options.map, {fault: place_of(fault, checkout) for fault in faults})
  marks = _ANY if options.all else ("-m", f"not ({_OUTSIDE})")
  tries = [Try(fault, tests[fault], options.most, options.seconds, marks) for fault in faults]
  _forks.preload()
  context = multiprocessing.get_context("fork")
  with (
    tempfile.TemporaryDirectory(prefix="mpjax-mutations-") as folder,
    context.Pool(options.jobs, _begin, (checkout, pathlib.Path(folder))) as pool,
  ):
    rows = _tried(pool, tries)
  outcomes = collections.Counter(row["outcome"] for row in rows)
  print(", ".join(f"{outcome}: {times}" for outcome, times in outcomes.most_common()), flush=True)
  command = " ".join(("mutations", *(("--all",) if options.all else ())))
  commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
  head = {"checkout": subprocess.run(commit, capture_output=True, text=True).stdout.strip()}
  limits = {"most": options.most, "seconds": options.seconds, "took_s": round(time.monotonic() - begun)}
  return origin(command, "jaxlib", "pytest") | head | limits | {"faults": rows}


def table(report: dict[str, Any]) -> str:
  """How many faults in each folder the tests find, before and after, and those that none finds after."""
  after = {row["name"]: row for row in report["after"]["faults"]}
  before = {row["name"]: row for row in report["before"]["faults"]}
  every = {name: _folder(row["file"]) for name, row in (before | after).items()}
  folders = collections.Counter(sorted(every.values()))
  lines = [["faults", *folders.values(), folders.total()]]
  for title, rows in (("found before", before), ("found after", after)):
    found = collections.Counter(every[name] for name, row in rows.items() if row["outcome"] in _FOUND)
    lines.append([title, *(found[folder] for folder in folders), found.total()])
  missed = [[name, row["loses"]] for name, row in after.items() if row["outcome"] not in _FOUND]
  counts = markdown(["", *folders, "all"], lines)
  return f"{counts}\n\n{markdown(['fault that no test finds', 'what a user would lose'], missed)}"


def _folder(file: str) -> str:
  package, _, rest = file.removeprefix("mpjax/").partition("/")
  return package if rest else "others"


def _tried(pool: Any, tries: Sequence[Try]) -> list[dict[str, Any]]:
  """Returns the rows of the report; what fails without a fault is left out, and the fault tried again."""
  rows: dict[str, dict[str, Any]] = {}
  seconds = {test.test: test.seconds for one in tries for test in one.tests}
  bad: set[str] = set()
  passed: set[str] = set()
  waiting = list(tries)
  while waiting:
    for i, row in enumerate(pool.imap_unordered(functools.partial(_try, bad=frozenset(bad)), waiting), 1):
      rows[row["name"]] = row
      said = f"{row['outcome']}: {row['test']}" if row["test"] else f"{row['outcome']} {row['ran']} tests"
      print(f"{i}/{len(waiting)} {row['name']} {said} ({row['seconds']} s)", flush=True)
    found = {row["test"] for row in rows.values() if row["test"]} - passed
    shares = [sorted(found)[i :: pool._processes] for i in range(pool._processes)]
    again = functools.partial(_failing, seconds=seconds)
    fails = {test for share in pool.imap_unordered(again, filter(None, shares)) for test in share}
    passed |= found - fails
    bad |= fails
    for test in sorted(fails):
      print(f"fails without a fault: {test}", flush=True)
    waiting = [one for one in tries if rows[one.fault.name]["test"] in fails]
  return [rows[one.fault.name] for one in tries]


_copy = pathlib.Path()  # of the checkout, in each worker


def _begin(checkout: pathlib.Path, folder: pathlib.Path) -> None:
  """Makes a worker's copy."""
  global _copy
  _copy = _forks.copied(checkout, folder / str(os.getpid()))


def _try(one: Try, bad: Collection[str]) -> dict[str, Any]:
  """Puts a fault into the worker's copy and runs tests until one fails; returns a row of the report."""
  fault, path = one.fault, _copy / one.fault.file
  tests = [test for test in one.tests if test.test not in bad and test.file not in bad][: one.most]
  begun, ran = time.monotonic(), 0
  ended = _forks.Ended("passed", (), 0)
  with _edited(path, fault):
    for part in (tests[first:last] for first, last in itertools.pairwise(_PARTS)):
      left = one.seconds - (time.monotonic() - begun)
      if part and ended.kind == "passed":
        known = {test.test: test.seconds for test in part}
        ended = _forks.run_tests(_copy, known, left, ("-x", *one.options))
        ran += ended.ran
  found = ended.kind in _FOUND
  return {
    "name": fault.name,
    "file": fault.file,
    "loses": fault.loses,
    "mended": fault.mended,
    "outcome": ended.kind if found else "survived",
    "test": ended.failed[0] if found else "",
    "why": ended.why if found else "",
    "ran": ran,
    "candidates": len(one.tests),
    "seconds": round(time.monotonic() - begun, 1),
  }


@contextlib.contextmanager
def _edited(path: pathlib.Path, fault: Fault) -> Iterator[None]:
  """Puts a fault into a file while the block runs."""
  source, before = path.read_text(), path.stat()
  path.write_text(fault.applied(source))
  # Python takes a stored program for that of a file with the same time in seconds and the same size.
  other = before.st_mtime_ns - 10**9 * (10 + zlib.crc32(fault.name.encode()) % 10**6)
  os.utime(path, ns=(other, other))
  try:
    yield
  finally:
    path.write_text(source)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _failing(tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
  """Returns which of some tests, or modules of tests, fail without a fault."""
  failing: list[str] = []
  tests = list(tests)
  # A module that cannot be imported would keep the tests from running.
  for part in ([test for test in tests if "::" not in test], [test for test in tests if "::" in test]):
    known = {test: seconds.get(test, 1.0) for test in part}
    ended = _forks.run_tests(_copy, known, 30 + 10 * sum(known.values()), _ANY)
    failing += ended.failed if ended.kind != "passed" else ()
  return failing
