"""Which lines of mpjax each test executes: `pytest -p benchmarks.mutations._lines --lines FILE`.

FILE gets one JSON record a test: {"test", "seconds", "lines": {"mpjax/a.py": [line, ...]}}. A worker of
pytest-xdist writes a file of its own, with its name before the suffix. What a process that a test starts
executes is not seen.
"""

import collections
import importlib.machinery
import json
import pathlib
import sys
import time
import types
from collections.abc import Generator
from typing import Any

import pytest

_monitoring: Any = vars(sys)["monitoring"]  # of Python 3.12 and later
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TOOL = _monitoring.COVERAGE_ID


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--lines", metavar="FILE", help="write which lines of mpjax each test executes")


def pytest_configure(config: pytest.Config) -> None:
  if not config.option.lines:
    return
  worker = getattr(config, "workerinput", {}).get("workerid", "")
  if not worker and vars(config.option).get("numprocesses"):
    return  # its workers write
  path = pathlib.Path(config.option.lines)
  config.pluginmanager.register(
    Lines(path.with_name(f"{path.stem}_{worker}{path.suffix}") if worker else path)
  )


class Lines:
  def __init__(self, path: pathlib.Path):
    self._file = path.open("w")
    self._lines: dict[str, set[int]] = collections.defaultdict(set)
    _monitoring.use_tool_id(_TOOL, "lines of mpjax")
    _monitoring.register_callback(_TOOL, _monitoring.events.LINE, self._line)
    # Only code of mpjax is watched: all of JAX's, too, would take longer than the tests.
    get_code = importlib.machinery.SourceFileLoader.get_code

    def watched(loader: Any, name: str) -> Any:
      code = get_code(loader, name)
      if name.partition(".")[0] == "mpjax":
        _watch(code)
      return code

    importlib.machinery.SourceFileLoader.get_code = watched  # type: ignore

  def _line(self, code: types.CodeType, line: int) -> object:
    self._lines[str(pathlib.Path(code.co_filename).relative_to(_ROOT))].add(line)
    return _monitoring.DISABLE  # until the next test

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
    self._lines.clear()
    _monitoring.restart_events()
    start = time.monotonic()
    result = yield
    lines = {name: sorted(found) for name, found in self._lines.items()}
    record = {"test": item.nodeid, "seconds": round(time.monotonic() - start, 3), "lines": lines}
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()
    return result


def _watch(code: Any) -> None:
  _monitoring.set_local_events(_TOOL, code, _monitoring.events.LINE)
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      _watch(constant)
