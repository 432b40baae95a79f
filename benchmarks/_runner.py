"""Runs the rows of a suite, each in a process of its own, into one report.

A suite is a module of this package with

    PACKAGES                   # of whose versions its figures depend, beside jax and mpjax; may be missing
    TIMED = True               # where rows are timed: one runs at a time; may be missing
    rows()                     # its cases: a `Row` for every line of the report
    table(report)              # the report as Markdown

and `rows` only says what there is: everything that takes time is in `Row.measure`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_MARK = "@row "  # libraries print, too


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of a report.

  Attributes:
    facts: what it is, as the report has it; its values together are its name.
    measure: finds the figures, in a process that does nothing else.
  """

  facts: dict[str, Any]
  measure: Callable[[], dict[str, Any]]

  @property
  def name(self) -> str:
    """What `--match` looks at."""
    return ", ".join(str(value) for value in self.facts.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what every suite takes."""
  parser.add_argument("--match", type=re.compile, metavar="REGEX", help="rows whose name has this")
  parser.add_argument("--jobs", type=int, default=1, help="rows at a time, unless they are timed")
  parser.add_argument("--row", help=argparse.SUPPRESS)


def run(suite: Any, name: str, options: argparse.Namespace) -> dict[str, Any] | int:
  """Measures the rows of a suite that match, prints what it finds, and returns the report.

  Rows that the file under `--json` has already, of the same commit and versions, are not measured again.
  """
  rows = {row.name: row for row in suite.rows()}
  if options.row is not None:
    print(_MARK + json.dumps(rows[options.row].measure()), flush=True)
    return 0
  words = [name, *(["--match", options.match.pattern] if options.match else [])]
  report = origin(shlex.join(words), *getattr(suite, "PACKAGES", ()))
  known = _known(report, options.json)
  wanted = [row for row in rows.values() if options.match is None or options.match.search(row.name)]
  if not wanted:
    sys.exit(f"--match {options.match.pattern}: none of {len(rows)} rows has that in its name")
  report["rows"] = []
  jobs = 1 if getattr(suite, "TIMED", False) else options.jobs
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    figures = pool.map(lambda row: known.get(row.name) or _apart(name, row), wanted)
    for number, (row, found) in enumerate(zip(wanted, figures, strict=True)):
      report["rows"].append({"name": row.name} | row.facts | found)
      print(f"[{number + 1}/{len(wanted)}] {row.name}: {found.get('error', 'done')}", flush=True)
      later = [known[row.name] for row in wanted[number + 1 :] if row.name in known]
      write(report | {"rows": report["rows"] + later}, options.json)
  failed = sum("error" in row for row in report["rows"])
  if failed:
    print(f"{failed} of {len(wanted)} rows failed", file=sys.stderr)
    return 1
  # A table needs all rows.
  print(f"\n{suite.table(report) if options.match is None else json.dumps(report['rows'], indent=1)}")
  return report


def _known(head: dict[str, Any], path: pathlib.Path | None) -> dict[str, dict[str, Any]]:
  if path is None or not path.exists():
    return {}
  before = json.loads(path.read_text())
  same = all(before.get(key) == head[key] for key in ("commit", "device", "versions"))
  if not same or head["commit"].endswith("+"):
    return {}
  return {row["name"]: row for row in before["rows"] if "error" not in row}


def _apart(suite: str, row: Row) -> dict[str, Any]:
  """Figures of a row from a process of its own; `error` where that one fails."""
  command = [sys.executable, "-m", "benchmarks", suite, "--row", row.name]
  environment = {"JAX_PLATFORMS": "cpu", **os.environ}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
  for line in done.stdout.splitlines():
    if line.startswith(_MARK):
      found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
      return found
  lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
  return {"error": lines[-1][:300]}


def origin(command: str, *packages: str) -> dict[str, Any]:
  """The first entries of a report: command, commit, day, machine and versions."""
  return {
    "command": f"python scripts/bench.py {command}".strip(),
    "commit": commit(),
    "date": datetime.date.today().isoformat(),
    "device": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
    "versions": {name: version for name in ("jax", *packages, "mpjax") if (version := installed(name))},
  }


def commit() -> str:
  """The commit of this checkout, with a plus where its files differ."""
  if shutil.which("git") is None:
    return ""
  git = lambda *words: subprocess.run(
    ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
  ).stdout.strip()
  return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "mpjax") else "")


def installed(package: str) -> str:
  """The version of a package; empty if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ""


def write(report: dict[str, Any], path: pathlib.Path | None) -> None:
  """Writes a report as JSON, where a path is given."""
  if path is not None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def provenance(report: dict[str, Any]) -> str:
  """How the figures of a report were made, in a line."""
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return f"`{report['command']}` at {report['commit']}, {report['date']}, on {report['device']}; {versions}."


def compile_for(target: str, program: Callable[..., Any], *shapes: Any, donate: Sequence[int] = ()) -> Any:
  """Compiles a program for a device, described or `here`.

  Args:
    target: as `mpjax.planner.get_target` takes it.
    program: a function, jitted or not.
    *shapes: of its arguments.
    donate: which arguments' memory the results may take.

  Returns:
    A `Program` of the planner.
  """
  import jax

  from mpjax.planner import get_target
  from mpjax.planner.compiled._compile import compile_step

  counts = [len(jax.tree.leaves(shape)) for shape in shapes]
  leaves = [i for n in donate for i in range(sum(counts[:n]), sum(counts[: n + 1]))]
  return compile_step(program, shapes, leaves, get_target(target))


def memory(program: Any) -> dict[str, Any]:
  """Bytes that a compiled program takes and moves."""
  return {
    "temporaries": program.temporaries,
    "arguments": program.arguments,
    "aliases": program.aliases,
    "peak": program.peak,
    "accessed": program.accessed,
  }


def plan_figures(plan: Any) -> dict[str, Any]:
  """What a compiled plan says of memory and of what crosses."""
  return {
    "parameters": plan.parameters,
    "arguments": plan.compiled.arguments,
    "temporaries": plan.compiled.temporaries,
    "peak": plan.compiled.peak,
    "analytic_peak": plan.memory.peak,
    "collectives": [
      {"operation": c.operation, "dtype": c.dtype, "bytes": c.nbytes, "count": c.count}
      for c in plan.collectives
    ],
  }


def markdown(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
  """A table; what is not text is written as `str` has it."""
  rows = [list(heads), ["---"] * len(heads), *([str(cell) for cell in line] for line in lines)]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def chosen(report: dict[str, Any], **facts: Any) -> list[dict[str, Any]]:
  """Rows of a report by some of their facts."""
  return [row for row in report["rows"] if all(row[key] == value for key, value in facts.items())]


def one(report: dict[str, Any], **facts: Any) -> dict[str, Any]:
  """The row of a report with these facts."""
  (row,) = chosen(report, **facts)
  return row
