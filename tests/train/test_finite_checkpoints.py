"""Checkpoints of states that are not finite: never kept, never resumed from, and the end of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.cli import main
from mpjax.step import TrainState
from mpjax.train import CheckpointError, ConfigError, Stuck, checkpoints as saving, load_config, make_setup
from mpjax.train.checkpoints import Checkpoints
from tests.train._runs import LINE
from tests.train._tiny_gpt import records

NAN, INF = np.nan, np.inf


def make_state(step, **bad):
  """A state in which `bad` names leaves, each with the value of its last element."""

  def put(name, values, dtype=np.float32):
    array = np.array(values, dtype)
    if name in bad:
      array.reshape(-1)[-1] = bad[name]
    return jnp.asarray(array)

  params = {"w": put("w", np.arange(8) + step), "half": put("half", [1] * 4, jnp.bfloat16)}
  model_state = {"mean": put("mean", [0] * 3), "mask": put("mask", [0, 0, -INF])}
  moments = {
    "mu": put("mu", [0] * 8),
    "best": put("best", INF),
    "codes": put("codes", [0] * 4, jnp.float8_e5m2),
  }
  count = put("count", step, np.int32)
  return TrainState(count, params, model_state, moments | {"count": count}, jax.random.key(step))


def save(checkpoints, step, skips=0, **bad):
  return checkpoints.save(step, make_state(step, **bad), {}, {}, None, skips)


def test_a_state_with_nan_pushes_out_no_checkpoint_and_an_infinity_may_stay(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  assert [save(checkpoints, step) for step in (1, 2)] == ["", ""]
  for step, (leaf, path) in enumerate(
    [
      ("w", "params/w"),
      ("half", "params/half"),
      ("mean", "model_state/mean"),
      ("mu", "opt_state/mu"),
      ("codes", "opt_state/codes"),
      ("best", "opt_state/best"),  # it began as infinity
    ],
    3,
  ):
    assert save(checkpoints, step, **{leaf: NAN}) == f"{path} holds NaN"
  checkpoints.close()
  resumed = Checkpoints(tmp_path / "checkpoints")
  assert resumed.steps() == [1, 2]
  assert resumed.restore_latest(make_state(0)).step == 2
  resumed.close()


def test_a_checkpoint_of_nan_that_is_there_is_not_resumed_from(tmp_path, monkeypatch):
  folder = tmp_path / "checkpoints"
  before = Checkpoints(folder, keep=3)
  with monkeypatch.context() as patched:  # or none would be saved
    patched.setattr(saving, "_nan", lambda *_: "")
    for step, bad in ((2, {}), (4, {"w": NAN}), (6, {"w": NAN, "mu": NAN})):
      save(before, step, **bad)
    before.close()
  with pytest.raises(
    CheckpointError, match=r"of step 6 is not finite: opt_state/mu holds NaN, params/w holds"
  ):
    Checkpoints(folder).restore(6, make_state(0))
  checkpoints = Checkpoints(folder)
  resumed = checkpoints.restore_latest(make_state(0))
  assert resumed.step == 2
  assert resumed.unfit[1] == "the checkpoint of step 4 is not finite: params/w holds NaN"
  assert save(checkpoints, 4) == ""
  checkpoints.close()


def test_steps_that_are_skipped_do_not_push_out_the_last_one_that_was_taken(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  for step, skips in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3)):
    assert save(checkpoints, step, skips) == ""
  checkpoints.wait()
  assert checkpoints.steps() == [2, 4, 5]
  for step in (6, 7):
    save(checkpoints, step)
  checkpoints.close()
  assert Checkpoints(tmp_path / "checkpoints").steps() == [6, 7]


# Runs.


def config(out, steps=30, at=10, bad=1000, **train):
  """A run whose update number `at` makes its parameters NaN."""
  return LINE | {
    "out": str(out),
    "data": {"kind": "points", "bad": bad, "batch_size": 16},
    "optimizer": {"target": "nan_once", "options": {"at": at}},
    "train": {"steps": steps, "checkpoint_every": 5, "eval_every": 1000, "log_every": 1} | train,
  }


def kept(out):
  """The states of the checkpoints that are there, by step."""
  setup = make_setup(load_config(out / "config.yaml"))
  checkpoints = Checkpoints(out / "checkpoints")
  states = {step: checkpoints.restore(step, setup.shapes()[0]).state for step in checkpoints.steps()}
  checkpoints.close()
  return states


@pytest.mark.parametrize("steps", [30, 12])  # NaN at a checkpoint on the way, and at the end
def test_a_run_whose_parameters_are_nan_ends_with_status_3_and_keeps_the_last_good_ones(tmp_path, steps):
  out, settings = tmp_path / "run", {"steps": steps, "skip_nonfinite": False}
  for _ in range(2):  # the same command again does not resume from NaN
    with pytest.raises(Stuck) as stopped:
      mpjax.train.run(config(out, **settings))
    first, last = str(stopped.value).split("\n")
    assert f"stopped at step {min(steps, 15)}: the state is not finite" in first
    assert "params/b holds NaN, params/w holds NaN" in first
    assert f"the last good checkpoint is of step 10: train.init_from={out} with another out=" in last
    assert "train.skip_nonfinite=true" in last
    assert stopped.value.exit_status == 3
    assert not (out / "summary.json").exists()
    states = kept(out)
    assert sorted(states) == [5, 10]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves([s.params for s in states.values()]))
  new = config(tmp_path / "new", steps=5, at=1000, init_from=str(out))
  assert mpjax.train.run(new).final_loss < records(out)[9]["loss"]


@pytest.mark.parametrize("policy", ["fp32", "fp16"])  # a loss scale has far to fall, which mends no update
def test_checkpoints_of_a_run_with_one_nan_update_keep_one_from_before_it(tmp_path, policy):
  with pytest.raises(Stuck, match=r"stopped at step 1[89]:") as stopped:
    mpjax.train.run(config(tmp_path / "run", steps=100, max_skips=8) | {"policy": policy})
  assert "finite gradients, and an update" in str(stopped.value)
  states = kept(tmp_path / "run")
  assert any(step <= 10 for step in states)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves([s.params for s in states.values()]))
  assert "the last good checkpoint is of step" in str(stopped.value)


def test_a_run_that_ends_with_a_nan_loss_is_not_finished(tmp_path, capsys):
  file = tmp_path / "config.yaml"
  file.write_text(json.dumps(config(tmp_path / "run", steps=3, bad=0)))
  for _ in range(2):
    assert main(["train", str(file)]) == 3
    shown = capsys.readouterr()
    assert "run finished" not in shown.out
    assert "error: stopped at step 3, the last: its loss is nan" in shown.err
    assert "the last good checkpoint is of step 3" in shown.err
  assert not (tmp_path / "run" / "summary.json").exists()


def test_no_run_starts_from_parameters_that_are_nan(tmp_path):
  first = config(tmp_path / "first", steps=2, export="safetensors")
  file = mpjax.train.run(first).export
  content = bytearray(file.read_bytes())
  content[-4:] = np.float32(np.nan).tobytes()
  file.write_bytes(content)
  with pytest.raises(ConfigError, match=r"train.init_from=.*: params/\w holds NaN"):
    mpjax.train.run(config(tmp_path / "second", init_from=str(file)))
