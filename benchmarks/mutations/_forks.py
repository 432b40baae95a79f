"""Tests in a process that has imported JAX and its company, but nothing of mpjax: a fork takes no time.

Everything here runs in a copy of a checkout, never in the checkout.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pytest

_TICK_S = 0.02
_PRELOADED = (
  "jax jax.experimental.pallas flax.nnx flax.linen optax optax.contrib yaml jmp pydantic rich.console"
)
_OWN = ("mpjax", "tests", "benchmarks", "scripts", "examples")  # packages that the copy has itself
_COLLECTS_S = 120.0
_SLACK_S, _SLACK = 30.0, 10.0  # a test hangs that takes so much more time than it took


class Ended(NamedTuple):
  """What became of some tests.

  Attributes:
    kind: "passed", "failed", "collection" (a module of tests cannot be imported), "timeout" (of one test),
      "crash" or "over" (the time for all of them).
    failed: the tests, or files, that did.
    ran: how many began.
    why: the first line of the first error.
  """

  kind: str
  failed: tuple[str, ...]
  ran: int
  why: str = ""


def preload() -> None:
  """Imports what tests import, as far as it is there, so that forks need not."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as tests/conftest.py does, before JAX is imported
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
  for name in _PRELOADED.split():
    try:
      importlib.import_module(name)
    except ImportError:
      continue


def copied(checkout: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Copies what git knows of a checkout, or would take, to a folder."""
  listed = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
  for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
    source, target = checkout / name, folder / name
    if name and source.is_file():
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, target)
  return folder


def run_tests(
  copy: pathlib.Path,
  seconds: dict[str, float],
  limit_s: float,
  options: Sequence[str],
) -> Ended:
  """Runs tests in a fork, in an order that keeps those of a file together.

  Args:
    copy: where they are; the process works there.
    seconds: what each took once.
    limit_s: seconds for all of them, more where other processes run.
    options: for pytest.
  """
  log, out = copy / "tests.jsonl", copy / "tests.log"
  log.unlink(missing_ok=True)
  log.touch()
  process = os.fork()
  if not process:
    _in_child(copy, list(seconds), log, out, options)
  seen = _Seen(seconds)
  begun = time.monotonic()
  with log.open() as records:
    while True:
      ended, status = os.waitpid(process, os.WNOHANG)
      seen.read(records.read())
      if ended:
        return seen.outcome(os.waitstatus_to_exitcode(status), out)
      hangs = seen.hangs()
      if hangs or time.monotonic() - begun > limit_s * _busy():
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        which = (seen.running,) if hangs else ()
        kind = "failed" if seen.failed else "timeout" if hangs else "over"
        return Ended(kind, (*seen.failed, *which), seen.ran, seen.why)
      time.sleep(_TICK_S)


def _busy() -> float:
  """Returns how many processes there are for a core, 1 at least: seconds are of an idle machine."""
  return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class _Seen:
  """What the records of a fork say so far."""

  def __init__(self, seconds: dict[str, float]):
    self._seconds = seconds
    self.running, self._since = "", time.monotonic()
    self.failed: list[str] = []
    self.broken: list[str] = []
    self.ran, self.why, self._begun = 0, "", ""

  def read(self, text: str) -> None:
    *lines, self._begun = (self._begun + text).split("\n")
    for record in map(json.loads, lines):
      if "begins" in record:
        self.running, self._since = record["begins"], time.monotonic()
        self.ran += 1
      else:
        (self.broken if record["collecting"] else self.failed).append(record["failed"])
        self.why = self.why or record["why"]

  def hangs(self) -> bool:
    known = self._seconds.get(self.running)
    limit = _COLLECTS_S if known is None else _SLACK_S + _SLACK * known
    return time.monotonic() - self._since > limit * _busy()

  def outcome(self, status: int, out: pathlib.Path) -> Ended:
    if self.failed:
      return Ended("failed", tuple(dict.fromkeys(self.failed)), self.ran, self.why)
    if self.broken or status in (3, 4):  # an error of pytest itself: conftest cannot be imported
      why = self.why or next(iter(reversed(out.read_text(errors="replace").split("\n")[-3:-1])), "")
      return Ended("collection", tuple(self.broken) or ("tests/conftest.py",), self.ran, why[:200])
    if status not in (0, 5) and not self.ran:  # 5: all tests were left out by a mark
      raise RuntimeError(f"pytest ended with status {status}:\n{out.read_text(errors='replace')[-2000:]}")
    if status not in (0, 5):
      return Ended("crash", (self.running,), self.ran, f"exit status {status}")
    return Ended("passed", (), self.ran)


def _in_child(
  copy: pathlib.Path, tests: list[str], log: pathlib.Path, out: pathlib.Path, options: Sequence[str]
) -> None:
  """Runs pytest in a fork, and ends it."""
  status = 1
  try:
    os.setsid()  # what tests start ends with them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(copy)
    here = pathlib.Path(__file__).resolve().parents[2]
    for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
      del sys.modules[name]
    others = [path for path in sys.path if pathlib.Path(path or ".").resolve() not in (here, copy)]
    sys.path[:], sys.argv = [str(copy), *others], ["pytest"]
    os.environ["PYTHONPATH"] = str(copy)
    arguments = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={copy / 'basetemp'}", *options]
    files = [f for f in dict.fromkeys(test.partition("::")[0] for test in tests) if (copy / f).exists()]
    status = int(pytest.main([*arguments, *files], plugins=[_Recorder(log, tests)])) if files else 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(status)


class _Recorder:
  """A plug-in of pytest that runs some tests in their order, and writes what becomes of each."""

  def __init__(self, log: pathlib.Path, tests: Collection[str]):
    self._log = log.open("a", buffering=1)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    order = {test: i for i, test in enumerate(tests)}
    self._place = {test: (files.index(test.partition("::")[0]), i) for test, i in order.items()}

  def _write(self, **record: Any) -> None:
    self._log.write(json.dumps(record) + "\n")

  @pytest.hookimpl(trylast=True)  # conftest.py has an order of its own
  def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
    left = [item for item in items if item.nodeid not in self._place]
    config.hook.pytest_deselected(items=left)
    items[:] = sorted((i for i in items if i.nodeid in self._place), key=lambda i: self._place[i.nodeid])

  def pytest_runtest_logstart(self, nodeid: str) -> None:
    self._write(begins=nodeid)

  def pytest_runtest_logreport(self, report: Any) -> None:
    if report.failed:
      self._write(failed=report.nodeid, why=_why(report), collecting=False)

  def pytest_collectreport(self, report: Any) -> None:
    if report.failed:
      self._write(failed=report.nodeid, why=_why(report), collecting=True)


def _why(report: Any) -> str:
  crash = getattr(report.longrepr, "reprcrash", None)
  text = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
  return (text[0] if crash is not None else text[-1])[:200] if text else ""
