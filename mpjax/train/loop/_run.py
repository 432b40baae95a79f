"""`mpjax.train.run`, and what it shares with `mpjax train`: one run, in one process or several."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import rich.console

from mpjax.train._errors import Interrupt
from mpjax.train.checkpoints import quiet
from mpjax.train.config._config import Config
from mpjax.train.config._config_file import ConfigSource, load_config, read_waits
from mpjax.train.config._plugins import load_plugins, plugin_digests
from mpjax.train.loop._loop import TrainingRun
from mpjax.train.loop._sinks import LOGGER, Output, Tracker, check_trackers, require_trackers, show_summary
from mpjax.train.processes import Processes, versions
from mpjax.train.setup._experiment import Setup, make_setup
from mpjax.train.setup._saved_run import RunDirectory


@dataclasses.dataclass(frozen=True, repr=False)
class RunResult:
  """The result of a run. `result["policy"]` is a value of the summary.

  Attributes:
    directory: the run directory: `config.yaml`, `metrics.jsonl`, `checkpoints/` and what trackers write.
    summary: the contents of its `summary.json`.
  """

  directory: pathlib.Path
  summary: dict[str, Any]

  def __getitem__(self, name: str) -> Any:
    return self.summary[name]

  def __repr__(self) -> str:
    losses = f"loss {self.final_loss:.4g}, eval loss {self.eval_loss:.4g}"
    return f"RunResult({self.directory}: {self.steps} steps, {losses})"

  @property
  def steps(self) -> int:
    """Returns the number of steps."""
    return int(self.summary["steps"])

  @property
  def final_loss(self) -> float:
    """Returns the loss of the last step."""
    return float(self.summary["final_loss"])

  @property
  def eval_loss(self) -> float:
    """Returns the loss of the last evaluation."""
    return float(self.summary["eval_loss"])

  @property
  def export(self) -> pathlib.Path | None:
    """Returns the exported file, `model.safetensors`; `None` if it does not exist."""
    file = self.directory / "model.safetensors"
    return file if file.exists() else None


def run(
  config: ConfigSource,
  overrides: Sequence[str] = (),
  *,
  plugins: str | Iterable[str] = (),
  console: rich.console.Console | None = None,
  trackers: Sequence[Tracker] = (),
) -> RunResult:
  """Trains a config's model, or resumes an unfinished run, as `mpjax train` does. Works in notebooks.

  Ctrl-C (or the notebook's stop button) saves a checkpoint before it raises; the same call resumes from it. A
  second one acts as usual.

  ```python
  result = mpjax.train.run("vit_digits", ["policy=fp16", "train.steps=100"])
  print(result.eval_loss, result.directory)
  ```

  If `jax.distributed` is running, every process has to call this. A hang (`distributed.hang_timeout_s`) then
  ends the process. In a run of one process only `mpjax train` does so.

  Args:
    config: a YAML file, the name of an example such as `gpt_stdlib`, a mapping, or a `Config`.
    overrides: texts `key=value`, as on the command line.
    plugins: as for `load_plugins`. Not needed for what this process has registered already.
    console: where progress goes, by default standard output. `rich.console.Console(quiet=True)` shows none.
      Handlers of the logger `mpjax.train` get the lines, too.
    trackers: what also takes the run's numbers, in addition to `train.trackers`.

  Returns:
    The run directory and the summary of the run.

  Raises:
    ConfigError: if the config cannot be run. Nothing was written; the directory may have been made.
    DataError: if data is missing or wrong, before anything is written; or if it cannot be read in mid-run.
    CheckpointError: if a checkpoint cannot be written, or none can be read.
    Interrupted: after SIGTERM, SIGHUP or Ctrl-C; a checkpoint was saved if a step was taken.
    Stuck: after `train.max_skips` skipped steps in a row at the lowest loss scale; if the state is not finite
      when a checkpoint is due; or if the last loss is not finite.
    TypeError: for trackers without its methods.
    Agreed: in each of several processes, if one of them met any of these before the first step.
  """
  require_trackers(trackers)

  def load() -> Config:
    load_plugins(plugins)
    return load_config(config, overrides)

  with Output(console) as output, Interrupt() as interrupt:
    processes = Processes(read_waits(config, overrides), interrupt)
    # The only process is the caller's.
    with processes.watched() if processes.count > 1 else contextlib.nullcontext():
      summary = train_together(load, processes, output, trackers)
    assert processes.directory is not None
    return RunResult(processes.directory, summary)


def train_together(
  load: Callable[[], Config], processes: Processes, output: Output, trackers: Sequence[Tracker] = ()
) -> dict[str, Any]:
  """Agrees on config, step and directory with the other processes, then trains; returns the summary."""
  if not processes.first:
    output.console = rich.console.Console(quiet=True)
  config, _ = processes.agree(load, lambda config: _tell_config(config, processes.count), same=True)
  processes.directory = path = pathlib.Path(str(config.out))
  LOGGER.disabled = False  # plug-ins that configure logging turn other loggers off by default

  def set_up() -> Setup:
    if processes.first:
      check_trackers(config)
    made = make_setup(config)
    made.check_step()
    return made

  setup, _ = processes.agree(set_up, _tell_setup, same=True)
  directory, summary = processes.agree(
    lambda: RunDirectory(config, owner=processes.first), lambda directory: directory.summary()
  )
  with contextlib.closing(directory):
    if summary is None:
      with quiet():
        return TrainingRun(setup, directory, processes, output.console, trackers).train()
    LOGGER.info("this run has finished already; choose another out= for a new one")
    if config.train.export is not None and not (path / "model.safetensors").exists():
      LOGGER.info(f"its weights are not exported: mpjax export {path} does that")
    show_summary(summary, path)
    return summary


def _tell_config(config: Config, count: int) -> dict[str, Any]:
  # `jax.distributed` does not compare the number that each process expects.
  about = {"number of processes": count, "versions": versions(), "plug-ins": plugin_digests()}
  return {**config.tree, **about}


def _tell_setup(setup: Setup) -> dict[str, Any]:
  # StableHLO depends only on the code and on versions.
  program = setup.step.jitted.lower(*setup.shapes()).as_text()
  digest = hashlib.blake2b(program.encode(), digest_size=8).hexdigest()
  return {"data": setup.info.fingerprint, "program of the step": digest}
