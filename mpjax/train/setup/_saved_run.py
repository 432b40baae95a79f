"""A run's directory: held by a run that writes in it, and as a value for tools, exports and new runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
from typing import IO, Any

import jax
import pydantic

from mpjax._types import PyTree
from mpjax.loss_scale import LossScaleState
from mpjax.optim import keeps_other_weights
from mpjax.registry import DataInfo
from mpjax.step import TrainState, can_adopt, merged, state_of, with_masters
from mpjax.train._errors import CheckpointError, ConfigError
from mpjax.train._export import WIDE, fitted, read_export, save_safetensors
from mpjax.train._files import write_atomically
from mpjax.train.checkpoints import Checkpoints, Restored, quiet
from mpjax.train.config._config import Config, export_dtype
from mpjax.train.config._config_file import has_grown, load_config, read_tree, run_mismatch
from mpjax.train.data import load_data
from mpjax.train.setup._experiment import Experiment, Place, weights_of

FACTS = "facts.json"


class RunDirectory:
  """The directory of a run, made if missing, and its lock. Processes that write nothing only use the path.

  Raises:
    ConfigError: if the directory holds a run of another config or is not a run's, or another process is
      running in it. Nothing in it was changed.
  """

  def __init__(self, config: Config, owner: bool = True):
    self._lock: IO[str] | None = None
    self._config, self._has_grown = config, False
    self.path = pathlib.Path(str(config.out))
    if not owner:
      return
    try:
      if self.path.exists():
        self._has_grown = _require_same(self.path, config)
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = _lock(self.path / ".lock")
    except OSError as error:
      raise ConfigError(f"out={self.path}: cannot be written ({error.strerror})") from error

  def summary(self) -> dict[str, Any] | None:
    """Returns the `summary.json` of a finished run.

    `None` if the run has not finished, if its steps have grown since, and in a process that does not write.
    """
    if self._lock is not None and not self._has_grown:
      with contextlib.suppress(OSError, ValueError):  # none, or a damaged one
        summary: dict[str, Any] = json.loads((self.path / "summary.json").read_bytes())
        return summary
    return None

  def begin(self, info: DataInfo) -> None:
    """Writes the config as it is now, and facts about its data; the run no longer counts as finished."""
    if self._lock is None:
      return
    (self.path / "summary.json").unlink(missing_ok=True)
    write_atomically(self.path / "config.yaml", self._config.to_yaml().encode())
    facts = {"data": _which(self._config), "info": dataclasses.asdict(info)}
    write_atomically(self.path / FACTS, (json.dumps(facts, indent=1) + "\n").encode())

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`, which marks the run as finished."""
    write_atomically(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

  def close(self) -> None:
    """Releases the lock of the directory."""
    if self._lock is not None:
      self._lock.close()


def _require_same(path: pathlib.Path, config: Config) -> bool:
  """Returns whether the config of a run directory has fewer steps; all else has to be the same.

  Raises:
    ConfigError: for another config, or a directory that is not a run's.
  """
  file = path / "config.yaml"
  # What a start leaves that failed before it wrote the config.
  begun = {".lock", "checkpoints", "config.yaml.tmp"}
  entries = [*path.iterdir(), *path.glob("checkpoints/*")] if path.is_dir() else []
  if not path.is_dir() or not (file.exists() or {str(each.relative_to(path)) for each in entries} <= begun):
    raise ConfigError(
      f"out={path}: exists and is not a run directory; nothing was changed, choose another out="
    )
  for entry in (*entries, *path.glob("tensorboard/*")):
    if entry.is_symlink():  # a run could be made to overwrite any file of the user
      raise ConfigError(
        f"out={path}: {entry.relative_to(path)} in it is a link, and a run writes only in its own directory: "
        "nothing was changed; choose another out="
      )
  if not file.exists():
    return False
  theirs = read_tree(file)
  differ = run_mismatch(theirs, config.tree)
  # After a start that failed there is at most an empty file of metrics.
  kept = (*path.glob("checkpoints/*"), *path.glob("summary.json"), *path.glob("metrics.jsonl"))
  if differ and any(entry.stat().st_size for entry in kept):
    raise ConfigError(
      f"out={path} holds a run of another config ({differ}): nothing was changed; choose another out=, "
      f"with train.init_from={path} to start from its parameters, or delete the directory to start over"
    )
  return has_grown(theirs, config.tree)


def _lock(path: pathlib.Path) -> IO[str]:
  file = path.open("w")
  # Windows has no flock: the user must not start two runs in one directory.
  with contextlib.suppress(ImportError):
    import fcntl

    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      file.close()
      raise ConfigError(f"out={path.parent}: another process is running in this directory") from None
  return file


class SavedRun:
  """A run, which may be in progress: its directory, and its config.

  Raises:
    ConfigError: if the directory has no config, or a damaged one.
  """

  def __init__(self, directory: str | pathlib.Path):
    self.directory = pathlib.Path(directory)
    if not (self.directory / "config.yaml").is_file():
      raise ConfigError(f"{directory} is not a run directory (no config.yaml)")
    self.config = load_config(self.directory)

  def experiment(self, at: Place) -> Experiment:
    """Returns what the run computes, at another place: what decides the shapes of its states.

    Raises:
      DataError: if the directory has no facts about the data, and the data cannot be read either.
    """
    info = facts_of(self.config, self.directory)
    return Experiment(self.config, info, self.config.resolve_policy(), at)

  def restore(self, which: str, experiment: Experiment) -> Restored:
    """Returns a checkpoint: `"best"` (lowest evaluation loss), `"latest"`, or that of a step.

    Raises:
      CheckpointError: if it is damaged, not finite, or not like the experiment's states.
      ConfigError: if there is no such checkpoint.
    """
    folder = self.directory / "checkpoints"
    with quiet(), contextlib.closing(Checkpoints(folder)) as checkpoints:
      steps = {str(step): step for step in checkpoints.steps()}
      named = steps | {"best": checkpoints.best(), "latest": checkpoints.latest()}
      if (step := named.get(which)) is None:
        there = f"{', '.join(steps)}, best, latest" if steps else "none"
        raise ConfigError(f"{self.directory} has no checkpoint {which!r}: there are {there}")
      return checkpoints.restore(step, experiment.shapes()[0])


def facts_of(config: Config, source: Any = None) -> DataInfo:
  """Returns the facts about a config's data: those of the run directory `source`, if of the same data.

  Raises:
    DataError: if they are to be read from the data, which is missing or cannot be used.
  """
  with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # other contents, or none
    saved = json.loads((pathlib.Path(source) / FACTS).read_bytes())
    if saved["data"] == _which(config):
      return pydantic.TypeAdapter(DataInfo).validate_python(saved["info"])
  # One row is enough to see the shapes.
  return load_data(config.changed({"data.batch_size": 1, "data.workers": 0}).data, seed=config.seed).info


def _which(config: Config) -> dict[str, Any]:
  """Returns the keys that decide what the facts are."""
  ours = ("batch_size", "eval_batches", "workers")
  return {key: value for key, value in config.tree["data"].items() if key not in ours}


def export_run(
  directory: str | pathlib.Path,
  dtype: str | None = None,
  step: str | int = "best",
  out: str | None = None,
  weights: str | None = None,
) -> pathlib.Path:
  """Exports a checkpoint of a run directory as safetensors.

  ```python
  path = mpjax.train.export_run("runs/gpt_stdlib-fp16", "bf16")
  model = mpjax.train.load_safetensors(path)
  ```

  Args:
    directory: the run directory.
    dtype: as for `save_safetensors`.
    step: `"best"` (lowest evaluation loss), `"latest"`, or a step number.
    out: the file; `None`: `model.safetensors` in the run directory.
    weights: `"average"`, which the run evaluated, or `"last"`, which it trained; by default the average if
      the run keeps one.

  Returns:
    The path of the file.

  Raises:
    ConfigError: if the directory does not have that checkpoint or average, or the file cannot be written.
  """
  saved = SavedRun(directory)
  path = pathlib.Path(out) if out else saved.directory / "model.safetensors"
  dtype = export_dtype(dtype)
  run = saved.experiment(Place.one())  # one device is enough, however many the run used
  if weights not in (None, "average", "last"):
    raise ConfigError(f"weights={weights}: expected average or last")
  if weights == "average" and not keeps_other_weights(run.state_shapes.opt_state):
    raise ConfigError(f"weights=average: {directory} keeps no average (train.average); expected weights=last")
  state = saved.restore(str(step), run).state
  chosen = functools.partial(weights_of, run.step, which=weights or "average", masters=dtype in WIDE)
  save_safetensors(path, saved.config, run.info, jax.jit(chosen)(state), state.model_state, dtype)
  return path


def start_from(setup: Experiment, state: TrainState) -> tuple[TrainState, str]:
  """Returns a new run's first state with the parameters that `train.init_from` names, and says whose.

  Raises:
    ConfigError: if there is no such run or export, or its parameters or optimiser do not fit.
  """
  path = pathlib.Path(str(setup.config.train.init_from))
  try:
    if (path / "config.yaml").is_file():
      return _from_run(path, setup, state)
    if not path.is_file():
      raise ConfigError("expected a run directory, or a file that mpjax export wrote")
    if setup.config.train.init_optimizer:
      raise ConfigError("it has only parameters; train.init_optimizer=true needs a run directory")
    weights = fitted(path, read_export(path)[1], state)
    return _with_weights(setup, state, *weights), f"parameters of {path}"
  except (CheckpointError, ConfigError) as error:
    raise ConfigError(f"train.init_from={path}: {error}") from error


def _from_run(path: pathlib.Path, setup: Experiment, state: TrainState) -> tuple[TrainState, str]:
  theirs = SavedRun(path)
  # What decides the shape of their state is theirs, the model is ours.
  kept = {f"train.{name}": getattr(theirs.config.train, name) for name in ("skip_nonfinite", "average")}
  kept |= {"policy": theirs.config.policy, "optimizer": theirs.config.optimizer}
  config = setup.config.changed(kept)
  before = dataclasses.replace(setup, config=config, policy=config.resolve_policy())
  restored = theirs.restore("latest", before)
  old, source = restored.state, f"parameters of step {restored.step} of {path}"
  if not setup.config.train.init_optimizer:
    masters = jax.jit(functools.partial(weights_of, before.step, masters=True))(old)
    average = "the average of the " if keeps_other_weights(old.opt_state) else ""
    return _with_weights(setup, state, masters, old.model_state), f"{average}{source}"
  step = setup.step
  if not can_adopt(step.layers(state), before.step.layers(old)):
    raise ConfigError(
      "its state is of another optimizer: use that run's optimizer section and train.average, or "
      "train.init_optimizer=false"
    )

  def adopt(old: TrainState) -> tuple[PyTree, PyTree]:
    adopted = step.adopt(old, before.step, warn=False)
    return adopted.arrays, _without_skips(adopted.opt_state)

  places = setup.layout.shardings(state)
  params, opt_state = jax.jit(adopt, out_shardings=(places.arrays, places.opt_state))(old)
  state = state.replace(arrays=params, model_state=old.model_state, opt_state=opt_state)
  return state, f"{source}, and its optimizer"


def _with_weights(setup: Experiment, state: TrainState, weights: PyTree, model_state: PyTree) -> TrainState:
  """Returns a run's first state with other weights of any dtype, from which its optimiser starts, too."""
  step, places = setup.step, setup.layout.shardings(state)
  like = jax.eval_shape(functools.partial(weights_of, step, which="last", masters=True), state)

  def taken(state: TrainState, weights: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    masters, model_state = (
      jax.tree.map(lambda x, leaf: x if x.dtype == leaf.dtype else x.astype(leaf.dtype), *pair)
      for pair in ((weights, like), (model_state, state.model_state))
    )
    # An optimiser may keep first weights, and an average starts with them, in the parameters' dtype.
    opt_state = step.tx.init(step.trained.seen(state, setup.policy.cast_to_param(masters)))
    layers = step.layers(state.replace(opt_state=opt_state))
    params, layers = with_masters(setup.policy, step.trained.seen(state, masters), layers)
    return merged(params, masters), state_of(layers), model_state

  weights, model_state = jax.device_put((weights, model_state), (places.arrays, places.model_state))
  out = (places.arrays, places.opt_state, places.model_state)
  arrays, opt_state, model_state = jax.jit(taken, out_shardings=out)(state, weights, model_state)
  return state.replace(arrays=arrays, opt_state=opt_state, model_state=model_state)


def _without_skips(opt_state: PyTree) -> PyTree:
  """Returns an optimiser's state with the counts of skipped steps at zero."""
  is_scale = lambda x: isinstance(x, LossScaleState)
  reset = lambda x: x._replace(skipped_steps=0 * x.skipped_steps, consecutive_skips=0 * x.consecutive_skips)
  return jax.tree.map(lambda x: reset(x) if is_scale(x) else x, opt_state, is_leaf=is_scale)
