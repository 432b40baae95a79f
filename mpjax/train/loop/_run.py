"""`mpjax.train.run`: does from Python what `mpjax train` does."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console

from mpjax.train.config._config import Config
from mpjax.train.config._config_file import ConfigSource, load_config, read_waits
from mpjax.train.config._plugins import load_plugins
from mpjax.train.loop._output import Output
from mpjax.train.loop._together import train_together
from mpjax.train.loop._trackers import Tracker
from mpjax.train.processes import Processes


@dataclasses.dataclass(frozen=True, repr=False)
class RunResult:
  """The result of a run. `result["policy"]` is a value of the summary.

  Attributes:
    directory: the run directory, with `config.yaml`, `metrics.jsonl`, `checkpoints/` and `tensorboard/`.
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
  plugins: Iterable[str] = (),
  console: rich.console.Console | None = None,
  trackers: Sequence[Tracker] = (),
) -> RunResult:
  """Trains a config's model, or resumes an unfinished run, as `mpjax train` does. Works in notebooks.

  Ctrl-C (or the notebook's stop button) saves a checkpoint before it raises; the same call resumes from it.

  ```python
  result = mpjax.train.run("vit_digits", ["policy=fp16", "train.steps=100"])
  print(result.eval_loss, result.directory)
  ```

  If `jax.distributed` is running, every process has to call this. A hang (`distributed.hang_timeout_s`) then
  ends the process. In a run of one process only `mpjax train` does so.

  Args:
    config: a YAML file, the name of an example such as `gpt_stdlib`, a mapping, or a `Config`.
    overrides: texts `key=value`, as on the command line.
    plugins: files `FILE.py` and modules `package.module` that register models, data and optimisers. Not
      needed for those that this process has registered already.
    console: where progress goes, by default standard output. `rich.console.Console(quiet=True)` shows none.
      Handlers of the logger `mpjax.train` get the lines, too.
    trackers: what also takes the run's numbers, in addition to `train.trackers`.

  Returns:
    The run directory and the summary of the run.

  Raises:
    ConfigError, DataError: if the config cannot be run; nothing was written.
    CheckpointError: if a checkpoint cannot be written, or none can be read.
    Interrupted: after SIGTERM or Ctrl-C; a checkpoint was saved.
    Stuck: after `train.max_skips` skipped steps in a row at the lowest loss scale; if the state is not finite
      when a checkpoint is due; or if the last loss is not finite.
    Agreed: in a run of several processes, if one of them met any of these before the first step.
  """

  def load() -> Config:
    load_plugins(plugins)
    return load_config(config, overrides)

  with Output() as output, Processes(read_waits(config, overrides), may_exit=False) as processes:
    summary = train_together(load, processes, output, console, trackers)
    assert processes.directory is not None
    return RunResult(processes.directory, summary)
