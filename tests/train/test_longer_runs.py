"""Runs that grow, start from others, and report learning rates and gradient norms."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
import yaml

from mpjax.cli import main
from tests.train._tiny_gpt import records, write_tiny_gpt

pytestmark = pytest.mark.slow
OVERFLOWING = "policy={base: fp16, loss_scaling: {init_scale: 16777216}}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """Arguments of a run without dropout, in float32."""
  folder = tmp_path_factory.mktemp("tiny")
  return [*write_tiny_gpt(folder), "policy=fp32", "model.dropout=0", "train.checkpoint_every=10"]


@pytest.fixture(scope="module")
def first(tiny, tmp_path_factory):
  """The directory of a finished run of 20 steps, that no test may change."""
  out = tmp_path_factory.mktemp("first") / "run"
  assert main(["train", *tiny, f"out={out}"]) == 0
  return out


def train(arguments, out, *more):
  assert main(["train", *arguments, f"out={out}", *more]) == 0
  return records(out)


def losses(lines):
  return [(line["step"], line["loss"]) for line in lines]


def rates(lines):
  return [line["learning_rate"] for line in lines]


def test_learning_rate_and_gradient_norm_are_logged(first):
  lines = records(first)
  ramp = optax.linear_schedule(5e-3, 1e-2, 1)
  schedule = optax.join_schedules([ramp, optax.cosine_decay_schedule(1e-2, 18, alpha=0.1)], [2])
  np.testing.assert_allclose(rates(lines), [schedule(i) for i in range(20)], rtol=1e-5)
  assert all(0 < line["grad_norm"] < 100 for line in lines)
  summary = json.loads((first / "summary.json").read_text())
  assert (summary["learning_rate"], summary["grad_norm"]) == (rates(lines)[-1], lines[-1]["grad_norm"])


def test_tensorboard_and_the_table_have_them_and_no_loss_scale(first, tiny, capsys):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  events = EventAccumulator(str(first / "tensorboard"))
  events.Reload()
  tags = set(events.Tags()["scalars"])
  assert {"learning_rate", "grad_norm", "loss"} <= tags
  assert "loss_scale" not in tags
  assert "loss_scale" not in json.loads((first / "summary.json").read_text())
  assert main(["train", *tiny, f"out={first}"]) == 0
  table = capsys.readouterr().out
  assert "learning rate" in table
  assert "grad norm" in table
  assert "scale" not in table
  assert "skipped" not in table


def test_a_run_without_a_loss_scale_says_nothing_of_one(tiny, tmp_path, capsys):
  train(tiny, tmp_path / "plain", "train.steps=2", "policy=bf16")
  shown = capsys.readouterr().out
  assert "scale" not in shown
  assert "skipped" not in shown
  assert "adamw, learning rate 0.01, warm-up to step 2, cosine to 0.001 at step 2" in shown
  train(tiny, tmp_path / "scaled", "train.steps=2", "policy=fp16")
  shown = capsys.readouterr().out
  assert "loss scale" in shown
  assert "scale 2^16  skipped 0" in shown


def test_the_gradient_norm_is_of_unscaled_gradients_and_the_rate_waits_while_steps_are_skipped(
  tiny, first, tmp_path
):
  lines = train(tiny, tmp_path / "run", OVERFLOWING, "train.steps=20")
  skipped = [line["grads_finite"] is False for line in lines]
  assert any(skipped)
  assert not all(skipped)
  reference = records(first)
  finite = next(line for line in lines if line["grads_finite"])
  assert finite["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=0.2)
  assert all(isinstance(line["grad_norm"], str) for line in lines if line["grads_finite"] is False)
  # A skipped step has the rate that it would have been taken with, as has the next one.
  updates = np.cumsum([0, *(not skip for skip in skipped[:-1])])
  np.testing.assert_allclose(rates(lines), [rates(reference)[i] for i in updates], rtol=1e-5)


def test_a_resumed_run_logs_the_same_rates(tiny, tmp_path):
  whole = train(tiny, tmp_path / "whole", OVERFLOWING)
  train(tiny, tmp_path / "parts", OVERFLOWING, "train.steps=10", "optimizer.schedule_steps=20")
  parts = train(tiny, tmp_path / "parts", OVERFLOWING, "optimizer.schedule_steps=20")
  for key in ("loss", "learning_rate", "grad_norm"):
    assert [line[key] for line in parts] == [line[key] for line in whole]


def test_a_finished_run_grows_and_its_schedule_with_it(tiny, first, tmp_path, capsys):
  out = tmp_path / "run"
  shutil.copytree(first, out)
  lines = train(tiny, out, "train.steps=30")
  shown = capsys.readouterr().out
  assert (
    "train.steps grows from 20 to 30: the cosine schedule ends at step 30, no longer at 20; the learning rate is "
    in shown
  )
  assert "(optimizer.schedule_steps=20 keeps it as it was)" in shown
  assert [line["step"] for line in lines] == list(range(1, 31))
  assert losses(lines)[:20] == losses(records(first))
  assert rates(lines)[20] > rates(lines)[19]
  assert rates(lines)[29] == pytest.approx(1e-3, rel=0.1)
  assert json.loads((out / "summary.json").read_text())["steps"] == 30
  assert yaml.safe_load((out / "config.yaml").read_text())["train"]["steps"] == 30
  before = (out / "metrics.jsonl").read_bytes()
  train(tiny, out, "train.steps=30")  # finished
  assert before == (out / "metrics.jsonl").read_bytes()
  assert main(["train", *tiny, f"out={out}"]) == 2  # with 20 again
  assert "train.steps: 30 there, 20 here" in capsys.readouterr().err


def test_a_run_that_grew_is_bit_for_bit_the_longer_run(tiny, tmp_path, capsys):
  constant = "optimizer.schedule=constant"
  whole = train(tiny, tmp_path / "whole", constant, "train.steps=30")
  train(tiny, tmp_path / "parts", constant)
  parts = train(tiny, tmp_path / "parts", constant, "train.steps=30")
  assert losses(parts) == losses(whole)
  assert "train.steps grows from 20 to 30\n" in capsys.readouterr().out


def test_the_schedule_can_stay_as_it_was(tiny, first, tmp_path, capsys):
  out = tmp_path / "run"
  shutil.copytree(first, out)
  lines = train(tiny, out, "train.steps=24", "optimizer.schedule_steps=20")
  assert "the cosine schedule ends at step 20, as before" in capsys.readouterr().out
  np.testing.assert_allclose(rates(lines)[20:], 1e-3, rtol=1e-5)


def test_a_run_goes_on_with_other_intervals(tiny, first, tmp_path):
  out, until = tmp_path / "run", "optimizer.schedule_steps=20"
  train(tiny, out, "train.steps=10", until)
  often = [f"train.{key}=5" for key in ("log_every", "eval_every", "checkpoint_every", "max_skips")]
  lines = train(tiny, out, "train.steps=20", until, *often, "train.keep_checkpoints=1", "data.workers=2")
  logged = losses(line for line in lines if line["step"] > 10)
  assert logged == [line for line in losses(records(first)) if line[0] in (15, 20)]
  # Nothing is lost of a finished run: the same command with yet others has nothing to do.
  assert train(tiny, out, "train.steps=20", until) == lines


def test_no_other_change_comes_with_a_longer_run(tiny, first, capsys):
  before = (first / "config.yaml").read_bytes()
  assert main(["train", *tiny, f"out={first}", "train.steps=30", "seed=4"]) == 2
  error = capsys.readouterr().err
  assert "seed: 3 there, 4 here" in error
  assert "train.steps" not in error
  assert before == (first / "config.yaml").read_bytes()


@pytest.mark.parametrize("policy", ["fp16", "bf16_pure"])
def test_a_new_run_starts_from_the_parameters_of_another(tiny, first, tmp_path, capsys, policy):
  out = tmp_path / "run"
  lines = train(tiny, out, f"policy={policy}", f"train.init_from={first}", "train.steps=2", "seed=5")
  assert f"{out}, parameters of step 20 of {first}" in capsys.readouterr().out
  begun, left = records(first)[0]["loss"], records(first)[-1]["loss"]
  assert lines[0]["loss"] < (begun + left) / 2
  assert rates(lines)[0] == pytest.approx(5e-3)  # the schedule begins anew
  # Resumed, the other run is not needed.
  moved = first.rename(first.with_name("moved"))
  try:
    longer = train(tiny, out, f"policy={policy}", f"train.init_from={first}", "train.steps=4", "seed=5")
  finally:
    moved.rename(first)
  assert [line["step"] for line in longer] == [1, 2, 3, 4]


@pytest.mark.parametrize(
  "policies", [("fp32", "fp16"), ("fp16", "bf16"), ("fp32", "bf16_lean"), ("bf16_lean", "fp16")]
)
def test_policies_change_in_the_middle_of_a_run(tiny, tmp_path, policies):
  """Losses of the second half are those of one run, but for the policy's rounding."""
  whole = train(tiny, tmp_path / "whole", "optimizer.schedule_steps=20", "train.steps=20")
  first, second = tmp_path / "first", tmp_path / "second"
  options = ["optimizer.schedule_steps=20", "train.steps=10"]
  train(tiny, first, f"policy={policies[0]}", *options)
  lines = train(
    tiny, second, f"policy={policies[1]}", *options, f"train.init_from={first}", "train.init_optimizer=true"
  )
  np.testing.assert_allclose(rates(lines), rates(whole)[10:], rtol=1e-5)
  # The data begin anew, so losses are compared by their level.
  late, early = np.mean([loss for _, loss in losses(whole)[10:]]), losses(whole)[0][1]
  assert np.mean([loss for _, loss in losses(lines)]) < late + 0.2 * (early - late)
  assert all(line["skipped_steps"] == 0 for line in lines)


def test_a_run_continues_exactly_but_for_its_data(tiny, first, tmp_path):
  """The state of the optimiser is the other's: one step from both is the same, on one batch."""
  from mpjax.train import load_config, make_setup
  from mpjax.train._init_from import start_from
  from mpjax.train.checkpoints import Checkpoints

  config = load_config(tiny[0], [*tiny[1:], f"train.init_from={first}", "train.init_optimizer=true"])
  setup = make_setup(config)
  state, _ = start_from(setup, setup.first_state())
  checkpoints = Checkpoints(first / "checkpoints", read_only=True)
  old = checkpoints.restore(20, setup.abstract_state()).state
  checkpoints.close()
  for name in ("params", "opt_state", "model_state"):
    for a, b in zip(*(jax.tree.leaves(getattr(x, name)) for x in (state, old)), strict=True):
      np.testing.assert_array_equal(a, b)
  assert int(state.step) == 0


def test_a_schedule_that_has_ended_is_said(tiny, first, tmp_path, capsys):
  options = [f"train.init_from={first}", "train.init_optimizer=true", "train.steps=2"]
  lines = train(tiny, tmp_path / "run", *options)
  assert (
    "the optimizer comes with 20 updates, and the cosine schedule ends at step 2: the learning rate stays at 0.001 "
    "(optimizer.schedule_steps=22 ends it with this run)"
  ) in capsys.readouterr().out
  np.testing.assert_allclose(rates(lines), 1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_run_starts_from_an_export(tiny, first, tmp_path, capsys, dtype):
  file = tmp_path / "model.safetensors"
  assert main(["export", str(first), f"out={file}", f"dtype={dtype}"]) == 0
  lines = train(tiny, tmp_path / "run", f"train.init_from={file}", "train.steps=1")
  assert f"parameters of {file}" in capsys.readouterr().out
  by_run = train(tiny, tmp_path / "by_run", f"train.init_from={first}", "train.steps=1")
  assert lines[0]["loss"] == pytest.approx(by_run[0]["loss"], rel=1e-6 if dtype == "float32" else 0.02)


def test_over_eight_devices_too(tiny, first, tmp_path):
  options = [f"train.init_from={first}", "train.init_optimizer=true", "train.steps=3"]
  one = train(tiny, tmp_path / "one", *options)
  eight = train(tiny, tmp_path / "eight", *options, "mesh={data: 2, fsdp: 4}")
  np.testing.assert_allclose([x for _, x in losses(eight)], [x for _, x in losses(one)], rtol=1e-4)
  np.testing.assert_allclose(
    [line["grad_norm"] for line in eight], [line["grad_norm"] for line in one], rtol=1e-3
  )


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (["train.init_from=/nowhere"], ["train.init_from=/nowhere", "run directory", "mpjax export"]),
    (["train.init_from=RUN", "model.dim=48"], ["train.init_from=", "of another state"]),
    (["train.init_from=FILE", "model.dim=48"], ["train.init_from=", "params", "same model section"]),
    (["train.init_from=FILE", "train.init_optimizer=true"], ["init_optimizer", "parameters alone"]),
    (["train.init_optimizer=true"], ["train: init_optimizer=true", "train.init_from"]),
    (["train.init_from=RUN", "train.init_optimizer=true", "optimizer.name=lion"], ["another optimizer"]),
    (["train.init_from=EMPTY"], ["train.init_from=", "no checkpoint"]),
  ],
)
def test_what_cannot_be_started_from_is_one_line(tiny, first, tmp_path, capsys, options, words):
  assert main(["export", str(first), f"out={tmp_path / 'x.safetensors'}"]) == 0
  (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
  shutil.copy(first / "config.yaml", tmp_path / "empty")
  names = {"RUN": first, "FILE": tmp_path / "x.safetensors", "EMPTY": tmp_path / "empty"}
  for name, path in names.items():
    options = [option.replace(f"={name}", f"={path}") for option in options]
  capsys.readouterr()
  assert main(["train", *tiny, f"out={tmp_path / 'run'}", *options]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1, error
  assert all(word in error for word in words), error


def test_a_start_that_failed_leaves_its_directory_to_the_next(tiny, first, tmp_path):
  out = tmp_path / "run"
  assert main(["train", *tiny, f"out={out}", "train.init_from=/nowhere"]) == 2
  lines = train(tiny, out, f"train.init_from={first}", "train.steps=1")
  assert len(lines) == 1
  assert yaml.safe_load((out / "config.yaml").read_text())["train"]["init_from"] == str(first)
