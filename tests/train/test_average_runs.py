"""`train.average`: what a run evaluates, saves, exports and hands on, when its optimiser keeps other weights."""

import json

import jax
import numpy as np
import optax.contrib
import pytest

import mpjax
from mpjax.cli import main
from mpjax.optim import evaluation_weights
from mpjax.train import load_config, load_safetensors, make_setup

# The logits of an evaluation.
from mpjax.train.setup._experiment import apply
from tests.train._runs import OVERFLOWING, assert_same_bits, curve, refused, state_of, train, write_line
from tests.train._tiny_gpt import records

AVERAGE = [OVERFLOWING, "train.average=0.9", "optimizer.schedule_steps=20", "train.export=safetensors"]
F32 = np.float32


@pytest.fixture(scope="module")
def line(tmp_path_factory):
  return write_line(tmp_path_factory.mktemp("line"))


@pytest.fixture(scope="module")
def run(line, tmp_path_factory):
  """The directory of a run that was stopped and resumed, some of whose steps were skipped."""
  out = tmp_path_factory.mktemp("run") / "run"
  train(line, out, *AVERAGE, "train.steps=10")
  train(line, out, *AVERAGE, "train.steps=20")
  return out


def mean_loss(params, run):
  """The loss of the run's evaluation, in NumPy."""
  batches = list(make_setup(load_config(run / "config.yaml")).data.eval())
  losses = [(x["x"] @ np.asarray(params["w"], F32) + F32(params["b"]) - x["y"]) ** 2 for x in batches]
  return np.mean(losses)


def weights_of(run):
  """The average, and the last weights of a run."""
  state = state_of(run)
  return evaluation_weights(state.params, state.opt_state), state.params


def test_a_run_evaluates_the_average_also_after_it_resumed(line, run, tmp_path, capsys):
  lines = train(line, tmp_path / "whole", *AVERAGE)
  assert "average  of the weights, decay 0.9" in capsys.readouterr().out
  average, last = weights_of(run)
  summary = json.loads((run / "summary.json").read_text())
  assert lines[-1]["skipped_steps"] > 0
  assert summary["eval_loss"] == pytest.approx(mean_loss(average, run), rel=0.02)
  assert summary["eval_loss"] != pytest.approx(mean_loss(last, run), rel=0.1)
  assert curve(run) == curve(tmp_path / "whole")
  assert_same_bits(state_of(run), state_of(tmp_path / "whole"))


def test_an_export_has_the_average_or_the_last_weights(line, run, tmp_path, capsys):
  file = tmp_path / "model.safetensors"
  export = lambda *keys: main(["export", str(run), "step=latest", "dtype=fp32", f"out={file}", *keys])
  average, last = weights_of(run)
  for keys, expected in (((), average), (["weights=average"], average), (["weights=last"], last)):
    assert export(*keys) == 0
    for name, found in load_safetensors(file).params.items():
      np.testing.assert_array_equal(found, expected[name])
  assert export() == 0
  exact, rounded = (load_safetensors(path) for path in (file, run / "model.safetensors"))  # by train.export
  setup = make_setup(exact.config)
  x, state = next(setup.data.eval())["x"], setup.for_evaluation(state_of(run))
  logits = jax.jit(apply, static_argnums=(0, 1))(setup.task.logits, setup.policy, state, x)
  np.testing.assert_array_equal(exact.logits(x), logits)
  np.testing.assert_allclose(rounded.logits(x), logits, atol=2e-3)
  refused(["export", str(run), "weights=mean"], ["weights=mean", "average or last"], capsys)
  plain = tmp_path / "plain"
  train(line, plain, "train.steps=1")
  refused(["export", str(plain), "weights=average"], ["weights=average", "train.average"], capsys)


def test_a_new_run_starts_from_the_average_or_goes_on_with_it(line, run, tmp_path, capsys):
  average, _ = weights_of(run)
  start = [f"train.init_from={run}", "train.steps=1", "policy=fp32"]
  again, on = tmp_path / "again", tmp_path / "on"
  lines = train(line, again, *start, "train.average=0.5")
  assert "the average of the parameters of step 20" in capsys.readouterr().out
  batch = next(make_setup(load_config(again / "config.yaml")).data.train())
  loss = np.mean((batch["x"] @ np.asarray(average["w"]) + np.asarray(average["b"]) - batch["y"]) ** 2)
  assert lines[0]["loss"] == pytest.approx(loss, rel=1e-4)
  found, last = weights_of(again)  # of its own two weights, not of random ones
  np.testing.assert_allclose(
    found["w"], 0.1 * np.asarray(average["w"]) + 0.9 * np.asarray(last["w"]), rtol=1e-5
  )
  adopt = [*start, "train.init_optimizer=true"]
  train(line, on, *adopt, "train.average=0.9")
  found, last = weights_of(on)
  np.testing.assert_allclose(
    found["w"], np.asarray(average["w"]) + 0.1 * (last["w"] - average["w"]), rtol=0.2
  )
  refused(["train", *line, f"out={tmp_path / 'no'}", *adopt], ["another optimizer", "train.average"], capsys)


def test_a_run_evaluates_the_weights_of_a_schedule_free_optimiser(line, tmp_path):
  @mpjax.train.register_optimizer("free")
  def free(learning_rate):
    return optax.contrib.schedule_free_adamw(learning_rate)

  out = tmp_path / "run"
  plugin = "optimizer={target: free, learning_rate: 0.1, schedule: constant}"
  train(line, out, "policy=fp32", "train.steps=10", plugin)
  x, y = weights_of(out)
  found = records(out)[-1]["eval_loss"]
  assert found == pytest.approx(mean_loss(x, out), rel=1e-4)
  assert found != pytest.approx(mean_loss(y, out), rel=0.01)
