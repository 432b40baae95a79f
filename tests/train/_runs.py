"""Runs of half a second, of a line and of a plug-in, and what tests ask of runs, states and errors."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import mpjax
from mpjax.cli import main
from mpjax.step import TrainStep
from mpjax.train import load_config, make_setup
from mpjax.train.checkpoints import Checkpoints
from tests.train._tiny_gpt import records

LINE = {
  "policy": "fp32",
  "seed": 3,
  "model": {"kind": "line"},
  "data": {"kind": "points", "batch_size": 16},
  "optimizer": {"learning_rate": 0.1, "warmup_steps": 2, "clip_norm": 1.0},
  "mesh": {"data": 1},
  "train": {"steps": 20, "log_every": 1, "eval_every": 10, "checkpoint_every": 4},
}
PLUGIN = str(pathlib.Path(__file__).with_name("_own_models.py"))
# Some steps of a line are skipped, and not all.
OVERFLOWING = "policy={base: fp16, loss_scaling: {init_scale: 1048576, growth_interval: 5}}"


class Points:
  """Rows around a line; from row `bad` on they are NaN."""

  def __init__(self, count, bad):
    self.count, self.bad = count, bad

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    x = np.random.default_rng(index).normal(size=4).astype(np.float32)
    return {"x": x, "y": np.float32(np.nan if index >= self.bad else x.sum())}


def register_line():
  """Registers the model `line`, its data, and an optimiser one of whose updates is NaN, with no NaN gradient."""

  @mpjax.train.register_model("line")
  def line(info, *, noise: float = 0.0, columns: int = 4):
    predicted = lambda params, x: x @ params["w"][: x.shape[1]] + params["b"]

    def loss_fn(params, batch, rng):
      error = predicted(params, batch["x"]) - batch["y"]
      return (error**2).mean() + noise * jax.random.uniform(rng)

    def evaluate(params, batch):
      return ((predicted(params, batch["x"]) - batch["y"]) ** 2).mean()

    def init(key):
      unused = np.random.default_rng(0).normal(size=columns - 4)  # beyond those of `x`
      return {"w": np.r_[np.zeros(4), unused].astype(np.float32), "b": np.zeros((), np.float32)}

    return mpjax.train.Task(init, loss_fn, evaluate, logits=predicted)

  @mpjax.train.register_data("points")
  def points(*, bad: int = 1000):
    return Points(64, bad), Points(16, 1000)

  @mpjax.train.register_optimizer("nan_once")
  def nan_once(learning_rate, *, at: int = 10):
    def update(updates, count, params=None):
      return jax.tree.map(lambda g: jnp.where(count == at, jnp.nan, -0.05 * g), updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def write_line(folder, **changes):
  """Arguments of `mpjax train` for a run of a line, without `out`."""
  file = folder / "line.yaml"
  file.write_text(yaml.safe_dump(LINE | changes))
  return [str(file)]


def write_config(folder, kind):
  config = {
    "policy": "fp16",
    "seed": 1,
    "model": {"kind": f"own_{kind}"},
    "data": {"kind": "blobs", "batch_size": 16},
    "optimizer": {"learning_rate": 1e-2},
    "mesh": {"data": 1},
    "train": {"steps": 12, "log_every": 1, "eval_every": 6, "checkpoint_every": 4, "checkpoint_wait": True},
  }
  file = folder / f"{kind}.yaml"
  file.write_text(yaml.safe_dump(config))
  return str(file)


def train(arguments, out, *more):
  """Trains to the end, and returns what was logged."""
  assert main(["train", *arguments, f"out={out}", *more]) == 0
  return records(out)


def last_step(directory):
  """The newest step in the records of a run that may be writing them."""
  file = directory / "metrics.jsonl"
  return max(map(int, re.findall(r'"step": (\d+),', file.read_text())), default=0) if file.exists() else 0


def curve(directory):
  """What has to be the same, bit for bit, however often a run was interrupted."""
  keys = ("step", "loss", "loss_scale", "skipped_steps", "learning_rate", "grad_norm", "eval_loss")
  return [tuple(record.get(key) for key in keys) for record in records(directory)]


class Killed(BaseException):
  """Stands for a process that is gone."""


def interrupt(patch, step, how):
  """Has the next run call `how` before the step that is its `step`th."""
  calls, call = [], TrainStep.__call__

  def counted(self, *args, **kwargs):
    calls.append(None)
    if len(calls) == step:
      how()
    return call(self, *args, **kwargs)

  patch.setattr(TrainStep, "__call__", counted)


def train_until_killed(arguments, out, step):
  """Trains, and ends before a step as a process that is gone."""

  def kill():
    raise Killed

  with pytest.MonkeyPatch.context() as patch:
    interrupt(patch, step, kill)
    with pytest.raises(Killed):
      main(["train", *arguments, f"out={out}"])


def state_of(directory, *overrides, step=None):
  """Returns the state of a checkpoint, the newest by default, where a config with these overrides has it."""
  setup = make_setup(load_config(directory / "config.yaml", list(overrides)))
  checkpoints = Checkpoints(directory / "checkpoints")
  state = checkpoints.restore(step or checkpoints.latest(), setup.shapes()[0]).state
  checkpoints.close()
  return state


def assert_same_bits(one, other, fields=("params", "opt_state", "model_state", "fp8_state")):
  for field in fields:
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(getattr(s, field)) for s in (one, other)), strict=True)
    for (path, a), (_, b) in pairs:
      where = field + jax.tree_util.keystr(path)
      assert (a.dtype, a.shape) == (b.dtype, b.shape), where
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where


def raises_one_line(kind, words, call, *arguments, **options):
  """Asserts that a call raises an error, of one line that has all the words."""
  try:
    call(*arguments, **options)
  except kind as error:
    message = str(error)
  else:
    raise AssertionError(f"nothing raised that says {words}")
  assert "\n" not in message, (words, message)
  assert all(word in message for word in words), (words, message)
  return message


def refused(arguments, words, capsys, status=2):
  """Asserts that a command ends with a status and one line on stderr that has all the words."""
  capsys.readouterr()
  assert main(arguments) == status, words
  error = capsys.readouterr().err
  assert error.startswith("error: "), error
  assert error.count("\n") == 1, error
  assert all(word in error for word in words), (words, error)
  return error
