"""The fault table: each fault by itself, with a verdict. python -m benchmarks.chaos --table [--rows REGEX]"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks._record import provenance
from benchmarks.chaos._starts import fork
from benchmarks.chaos._trial import NotHere, Prepared, Row, Trial, Wrong

RIGHT, WRONG, NOT_HERE = "right", "wrong", "not tried"
CASE_TIMEOUT_S = 1800


class Verdict(NamedTuple):
  """What a case of a row came to.

  Attributes:
    row, case: their names.
    verdict: `RIGHT`, `WRONG` or `NOT_HERE`.
    detail: what was wrong, why it was not tried, or what is counted of a case that is right.
    cpu_s: seconds of processor time.
  """

  row: str
  case: str
  verdict: str
  detail: str
  cpu_s: float


class _Running(NamedTuple):
  row: Row
  case: str
  folder: pathlib.Path
  deadline: float


def report(
  rows: Sequence[Row],
  root: pathlib.Path,
  prepared: Prepared | None,
  at_a_time: int | None = None,
  keep: pathlib.Path | None = None,
) -> tuple[dict[str, Any], bool]:
  """Tries all cases and prints each row as it ends.

  Args:
    rows: of the table.
    root: where folders of cases go; each is deleted when its case is right.
    prepared: what cases copy.
    at_a_time: how many cases; by default one for each core and one more.
    keep: where the folders of wrong cases go.

  Returns:
    The report, and whether no case is wrong.
  """
  start, lanes = time.monotonic(), at_a_time or len(os.sched_getaffinity(0)) + 1
  queue = [(row, case) for row in rows for case in row.cases]
  verdicts: dict[str, list[Verdict]] = {row.name: [] for row in rows}
  running: dict[int, _Running] = {}
  told: list[dict[str, Any]] = []
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what was begun
  try:
    while queue or running:
      while queue and len(running) < lanes:
        row, case = queue.pop(0)
        process, one = _begin(row, case, root, prepared)
        running[process] = one
      process, _, usage = os.wait4(-1, os.WNOHANG)
      if process not in running:
        time.sleep(0.01)
        process = next((x for x, one in running.items() if time.monotonic() > one.deadline), 0)
        if not process:
          continue
        _kill(process)
        _, _, usage = os.wait4(process, 0)
      one = running.pop(process)
      _kill(process)
      verdict = _verdict(one, usage.ru_utime + usage.ru_stime, root)
      _clear(one.folder, keep if verdict.verdict == WRONG else None)
      verdicts[one.row.name].append(verdict)
      if len(verdicts[one.row.name]) == len(one.row.cases):
        told.append(_told(one.row, verdicts[one.row.name]))
        _show(told[-1], time.monotonic() - start)
  finally:
    for process in running:
      _kill(process)
  order = [row.name for row in rows]
  told.sort(key=lambda row: order.index(row["name"]))
  wall = time.monotonic() - start
  figures = {"minutes": round(wall / 60, 1), "cpu_minutes": round(sum(row["cpu_s"] for row in told) / 60, 1)}
  return figures | {"at_a_time": lanes, "rows": told}, not any(row["wrong"] for row in told)


def merged(before: dict[str, Any], after: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
  """Returns a report in which some rows were tried again."""
  rows = {row["name"]: row for report in (before, after) for row in report["rows"]}
  minutes = {key: round(before[key] + after[key], 1) for key in ("minutes", "cpu_minutes")}
  return after | minutes | {"rows": [rows[name] for name in order if name in rows]}


def _begin(row: Row, case: str, root: pathlib.Path, prepared: Prepared | None) -> tuple[int, _Running]:
  folder = pathlib.Path(tempfile.mkdtemp(prefix="case-", dir=root))
  folder.chmod(0o755)

  def work() -> int:
    os.setpgid(0, 0)  # so that what a case leaves behind ends with it
    os.chdir(folder)
    try:
      trial = Trial(folder, prepared, random.Random(f"{row.name} {case}"))  # type: ignore[arg-type]
      found = (RIGHT, row.cases[case](trial) or "")
    except Wrong as error:
      found = (WRONG, str(error))
    except NotHere as error:
      found = (NOT_HERE, str(error))
    (folder / "verdict.json").write_text(json.dumps(found))
    return 0

  one = _Running(row, case, folder, time.monotonic() + CASE_TIMEOUT_S)
  return fork(work, folder / "case.log"), one


def _verdict(one: _Running, cpu_s: float, root: pathlib.Path) -> Verdict:
  try:
    verdict, detail = json.loads((one.folder / "verdict.json").read_text())
  except (OSError, ValueError):  # the check itself failed, or did not end
    verdict, detail = WRONG, f"not judged: {(one.folder / 'case.log').read_text(errors='replace')[-1500:]}"
  detail = detail.replace(str(one.folder), "").replace(str(root), "")
  return Verdict(one.row.name, one.case, verdict, _without_places(detail), cpu_s)


def _without_places(text: str) -> str:
  """Returns a text with paths as they are on every machine: below the checkout, or Python's installation."""
  text = text.replace(f"{pathlib.Path(__file__).parents[2]}/", "")
  return re.sub(r"(?:/[^/\s\"']+)+/(?=(?:site-packages|lib/python[\d.]+)/)", "", text)


def _told(row: Row, verdicts: Sequence[Verdict]) -> dict[str, Any]:
  by = collections.defaultdict(list)
  for verdict in verdicts:
    by[verdict.verdict].append(verdict)
  details = lambda found: [{"case": v.case, "detail": v.detail} for v in sorted(found, key=lambda v: v.case)]
  return {
    "name": row.name,
    "expected": row.expected,
    "right": len(by[RIGHT]),
    "of": len(by[RIGHT]) + len(by[WRONG]),
    "counted": dict(collections.Counter(v.detail for v in by[RIGHT] if v.detail).most_common()),
    "wrong": details(by[WRONG]),
    "not_tried": details(by[NOT_HERE]),
    "cpu_s": round(sum(v.cpu_s for v in verdicts), 1),
  }


def _show(row: dict[str, Any], seconds: float) -> None:
  print(f"{seconds / 60:5.1f} min  {row['right']} of {row['of']}  {row['name']}{_counted(row)}", flush=True)
  for kind, word in (("wrong", "WRONG"), ("not_tried", "not tried")):
    for case in row[kind]:
      print(f"           {word}: {case['case']}: {case['detail']}", flush=True)


def _counted(row: dict[str, Any]) -> str:
  counted = [f"{what}: {times}" for what, times in row["counted"].items()]
  return f" ({'; '.join(counted)})" if counted else ""


def _kill(group: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(group, signal.SIGKILL)


def _clear(folder: pathlib.Path, keep: pathlib.Path | None) -> None:
  """Deletes the folder of a case, whatever the case left in it."""
  if keep is not None:
    with contextlib.suppress(OSError):  # pipes and files that are gone
      shutil.copytree(folder, keep / folder.name, symlinks=True)
  small = folder / "small"
  if os.path.ismount(small):
    subprocess.run(["umount", "--lazy", str(small)], check=False)
  shutil.rmtree(folder, ignore_errors=True)


def table(report: dict[str, Any]) -> str:
  """Rows of the table: what was done, how many cases ended as they have to, and those that did not."""
  lines = ["| fault | right | each has to end in | other ends |", "|---|---|---|---|"]
  for row in report["rows"]:
    others = [f"{case['case']}: {_line(case['detail'])}" for case in row["wrong"]]
    if row["not_tried"]:
      reasons = collections.Counter(_line(case["detail"]) for case in row["not_tried"])
      others += [f"{count} not tried ({reason})" for reason, count in reasons.items()]
    right = f"{row['right']} of {row['of']}{_counted(row)}"
    lines.append(f"| {row['name']} | {right} | {row['expected']} | {'; '.join(others)} |")
  right, count = (sum(row[key] for row in report["rows"]) for key in ("right", "of"))
  text = (
    f"{right} of {count} cases ended as they have to, in {report['minutes']:g} minutes, "
    f"{report['at_a_time']} at a time ({report['cpu_minutes']:g} minutes of processor time)."
  )
  return "\n".join([*lines, "", text, "", provenance(report)])


def _line(text: str) -> str:
  return re.sub(r"\s+", " ", text.partition("; it said:")[0]).replace("|", "/")[:120]
