"""Where the time of the tests goes: `pytest --cost` prints each folder's cases and seconds of a processor.

They are those of the worker that ran a test, and of the processes that it started and waited for.
"""

import collections
import os
import time

import pytest


class Costs:
  """A plug-in of each process: workers of pytest-xdist measure, and the one that prints sums up."""

  def __init__(self):
    self.of_folder = collections.defaultdict(lambda: [0, 0.0])

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    before = _seconds()
    result = yield
    self._add("/".join(item.nodeid.split("::")[0].split("/")[1:-1]) or "tests", 1, _seconds() - before)
    return result

  def _add(self, folder, cases, seconds):
    self.of_folder[folder][0] += cases
    self.of_folder[folder][1] += seconds

  def pytest_sessionfinish(self, session):
    if hasattr(session.config, "workeroutput"):
      session.config.workeroutput["costs"] = dict(self.of_folder)

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node, error):
    for folder, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
      self._add(folder, *cost)

  def pytest_terminal_summary(self, terminalreporter):
    terminalreporter.section("what the tests cost: cases, seconds of a processor")
    rows = sorted(self.of_folder.items(), key=lambda row: -row[1][1])
    whole = [sum(column) for column in zip(*self.of_folder.values(), strict=True)] or [0, 0.0]
    for folder, (cases, seconds) in [*rows, ("all", whole)]:
      terminalreporter.write_line(f"{folder:24}{cases:>8}{seconds:>10.0f}")


def _seconds():
  times = os.times()
  return time.process_time() + times.children_user + times.children_system
