"""Where the time of the tests goes: `pytest --cost` prints a table by folder of what was traced, lowered and compiled.

Seconds are a processor's: of the worker that ran a test, and of the processes that it started and waited for. JAX
says how long each tracing, lowering and compilation took; one inside another counts once, for the inner one.
`--cost=FILE` writes a line for every test, too; what follows `--cost` without `=` is taken for FILE, unless it
looks like tests.
"""

import collections
import dataclasses
import os
import pathlib
import time

import jax
import pytest

_STAGES = {
  "/jax/core/compile/jaxpr_trace_duration": "trace",
  "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
  "/jax/core/compile/backend_compile_duration": "compile",
}
_FORMAT = "{:24}" + "{:>10}" * 8
_HEADER = _FORMAT.format(
  "folder", "cases", "programs", "CPU s", "tracing", "lowering", "compiling", "children", "other"
)


@dataclasses.dataclass
class Cost:
  cases: int = 0
  programs: int = 0
  cpu: float = 0.0  # seconds of the worker, as all of the following
  trace: float = 0.0
  lower: float = 0.0
  compile: float = 0.0
  children: float = 0.0  # seconds of processes that have ended

  def add(self, other):
    for field in dataclasses.fields(self):
      setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

  def row(self, name):
    whole = self.cpu + self.children
    other = self.cpu - self.trace - self.lower - self.compile
    seconds = (whole, self.trace, self.lower, self.compile, self.children, max(other, 0.0))
    return _FORMAT.format(name, self.cases, self.programs, *(f"{second:.0f}" for second in seconds))


class Costs:
  """A plug-in of a worker, or of the only process: what each test costs."""

  def __init__(self, file):
    self.of_folder = collections.defaultdict(Cost)
    self._now = Cost()
    self._spans = []  # [(start, seconds)] of the stages of this test that no later one contains
    self._file = file and open(file, "w")  # noqa: SIM115 (open for as long as the tests run)
    jax.monitoring.register_event_duration_secs_listener(self._stage)

  def _stage(self, event, duration, **_):
    if (stage := _STAGES.get(event)) is None:
      return
    start, inner = time.monotonic() - duration, 0.0
    while self._spans and self._spans[-1][0] >= start:
      inner += self._spans.pop()[1]
    self._spans.append((start, duration))
    setattr(self._now, stage, getattr(self._now, stage) + max(duration - inner, 0.0))
    self._now.programs += stage == "compile"

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    self._now, self._spans = Cost(cases=1), []
    wall, cpu, children = time.monotonic(), time.process_time(), _of_children()
    result = yield
    self._now.cpu, self._now.children = time.process_time() - cpu, _of_children() - children
    self.of_folder["/".join(item.nodeid.split("::")[0].split("/")[1:-1]) or "tests"].add(self._now)
    if self._file:
      cost = self._now
      seconds = (cost.trace, cost.lower, cost.compile, cost.children)
      row = (item.nodeid, time.monotonic() - wall, cost.cpu, cost.programs, *seconds)
      print(
        *(f"{value:.3f}" if isinstance(value, float) else value for value in row),
        sep="\t",
        file=self._file,
        flush=True,
      )
    return result

  def pytest_sessionfinish(self, session):
    if hasattr(session.config, "workeroutput"):  # of xdist: goes to the process that started the workers
      session.config.workeroutput["costs"] = {
        name: dataclasses.asdict(cost) for name, cost in self.of_folder.items()
      }


class Table:
  """A plug-in of the process that prints: the sum of the workers' costs."""

  def __init__(self, own):
    self.of_folder = own.of_folder if own else collections.defaultdict(Cost)

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node, error):
    for name, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
      self.of_folder[name].add(Cost(**cost))

  def pytest_terminal_summary(self, terminalreporter):
    terminalreporter.section("what the tests cost, in seconds of a processor")
    terminalreporter.write_line(_HEADER)
    whole = Cost()
    for name, cost in sorted(self.of_folder.items(), key=lambda entry: -(entry[1].cpu + entry[1].children)):
      terminalreporter.write_line(cost.row(name))
      whole.add(cost)
    terminalreporter.write_line(whole.row("all"))


def install(config):
  """Registers the plug-ins if `--cost` was given."""
  if not (option := config.option.cost):
    return
  if "::" in option or option.endswith(".py") or pathlib.Path(option).is_dir():  # it would be written over
    raise pytest.UsageError(f"--cost {option}: expected a file to write; say --cost after the tests")
  worker = getattr(config, "workerinput", {}).get("workerid", "")
  workers = not worker and config.option.numprocesses if hasattr(config.option, "numprocesses") else 0
  file = None
  if option != "table":
    path = pathlib.Path(option)
    file = path.with_name(f"{path.stem}_{worker}{path.suffix}") if worker else path
  own = None if workers else Costs(file)
  if own:
    config.pluginmanager.register(own, "costs")
  if not worker:
    config.pluginmanager.register(Table(own), "table of costs")


def _of_children():
  times = os.times()
  return times.children_user + times.children_system
