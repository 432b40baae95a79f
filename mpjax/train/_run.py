"""`mpjax.train.run`: a training run from Python, as `mpjax train` makes it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console

from mpjax.train._config import Config
from mpjax.train._config_file import ConfigSource, load_config, read_waits
from mpjax.train._output import Output
from mpjax.train._plugins import load_plugins
from mpjax.train._together import train_together
from mpjax.train.multiprocess import Processes


@dataclasses.dataclass(frozen=True, repr=False)
class RunResult:
  """The end of a run.

  Attributes:
    directory: the run directory, with `config.yaml`, `metrics.jsonl`, `checkpoints/` and `tensorboard/`.
    summary: what `summary.json` there says.
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
    """Returns the file that `train.export` asked for; `None` if it is not there."""
    file = self.directory / "model.safetensors"
    return file if file.exists() else None


def run(
  config: ConfigSource,
  overrides: Sequence[str] = (),
  *,
  plugins: Iterable[str] = (),
  console: rich.console.Console | None = None,
) -> RunResult:
  """Trains what a config says, resuming an unfinished run, as `mpjax train` does; in a notebook, too.

  Ctrl-C (or the notebook's stop button) saves a checkpoint before it raises; the same call goes on from it.

  Where `jax.distributed` runs already, every process of it calls this; a hang then ends the process
  (`distributed.hang_timeout_s`), which in a run of one process it does for `mpjax train` alone.

  Args:
    config: a YAML file, the name of an example such as `gpt_stdlib`, a mapping, or a `Config`.
    overrides: `key=value` each, as on the command line.
    plugins: files `FILE.py` and modules `package.module` that register models and data. What this process
      has registered already is there without.
    console: where progress goes; this process's output by default, `rich.console.Console(quiet=True)` for
      nowhere.

  Raises:
    ConfigError, DataError: before anything is written, for what cannot be run.
    CheckpointError: if a checkpoint cannot be written, or none can be read.
    Interrupted: after SIGTERM or Ctrl-C, a checkpoint saved.
    Stuck: after `train.max_skips` skipped steps in a row at the lowest loss scale, for a state that is not
      finite where a checkpoint is due, and for a last loss that is not.
    Agreed: in a run of several processes, any of these that one of them met before the first step.
  """

  def load() -> Config:
    load_plugins(plugins)
    return load_config(config, overrides)

  with Output() as output, Processes(read_waits(config, overrides), may_exit=False) as processes:
    summary = train_together(load, processes, output, console)
    assert processes.directory is not None
    return RunResult(processes.directory, summary)
