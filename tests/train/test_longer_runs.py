"""Runs that grow, start from others, and report learning rates and gradient norms."""

import json
import shutil

import numpy as np
import optax
import pytest
import yaml

from mpjax.cli import main
from mpjax.train import load_config, make_setup

# The state that a run begins with is nowhere written.
from mpjax.train.setup._saved_run import start_from
from tests.train._runs import OVERFLOWING, assert_same_bits, refused, state_of, train, write_line
from tests.train._tiny_gpt import records

UNTIL_20 = "optimizer.schedule_steps=20"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
  """Arguments of a run in float32."""
  return write_line(tmp_path_factory.mktemp("line"))


@pytest.fixture(scope="module")
def first(line, tmp_path_factory):
  """The directory of a finished run of 20 steps, that no test may change."""
  out = tmp_path_factory.mktemp("first") / "run"
  train(line, out)
  return out


@pytest.fixture
def copied(first, tmp_path):
  """A copy of `first`."""
  return shutil.copytree(first, tmp_path / "copied")


def losses(lines):
  return [(line["step"], line["loss"]) for line in lines]


def rates(lines):
  return [line["learning_rate"] for line in lines]


def test_learning_rate_and_gradient_norm_are_logged(first):
  lines = records(first)
  after = optax.cosine_decay_schedule(0.1, 18, alpha=0.1)
  np.testing.assert_allclose(rates(lines), [0.05, 0.1, *map(after, range(18))], rtol=1e-5)
  assert all(0 < line["grad_norm"] < 100 for line in lines)
  summary = json.loads((first / "summary.json").read_text())
  assert (summary["learning_rate"], summary["grad_norm"]) == (rates(lines)[-1], lines[-1]["grad_norm"])
  assert "loss_scale" not in summary


def test_a_run_without_a_loss_scale_says_nothing_of_one(line, tmp_path, capsys):
  train(line, tmp_path / "plain", "train.steps=2", "policy=bf16")
  shown = capsys.readouterr().out
  assert "scale" not in shown
  assert "skipped" not in shown
  assert "adamw, learning rate 0.1, warm-up to step 2, cosine to 0.01 at step 2" in shown
  train(line, tmp_path / "scaled", "train.steps=2", "policy=fp16")
  shown = capsys.readouterr().out
  assert "loss scale" in shown
  assert "scale 2^16  skipped 0" in shown


def test_the_gradient_norm_is_of_unscaled_gradients_and_the_rate_waits_while_steps_are_skipped(
  line, first, tmp_path
):
  lines = train(line, tmp_path / "run", OVERFLOWING)
  skipped = [line["grads_finite"] is False for line in lines]
  assert 0 < sum(skipped) < 19
  batches, taken = make_setup(load_config(line[0])).data.train(), skipped.index(False)
  batch = [next(batches) for _ in range(taken + 1)][-1]
  gradient = -2 * batch["y"] @ np.c_[batch["x"], np.ones(16)] / 16  # where all parameters are 0
  assert lines[taken]["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=0.01)
  assert all(isinstance(line["grad_norm"], str) for line in lines if line["grads_finite"] is False)
  # A skipped step has the rate that it would have been taken with, as has the next one.
  updates = np.cumsum([0, *(not skip for skip in skipped[:-1])])
  np.testing.assert_allclose(rates(lines), [rates(records(first))[i] for i in updates], rtol=1e-5)
  # A resumed run logs the same.
  train(line, tmp_path / "parts", OVERFLOWING, "train.steps=10", UNTIL_20)
  parts = train(line, tmp_path / "parts", OVERFLOWING, UNTIL_20)
  for key in ("loss", "learning_rate", "grad_norm"):
    assert [line[key] for line in parts] == [line[key] for line in lines]


def test_a_finished_run_grows_and_its_schedule_with_it(line, first, copied, capsys):
  lines = train(line, copied, "train.steps=30")
  assert "cosine to 0.01 at step 30" in capsys.readouterr().out
  assert [line["step"] for line in lines] == list(range(1, 31))
  assert losses(lines)[:20] == losses(records(first))
  assert rates(lines)[20] > rates(lines)[19]
  assert rates(lines)[29] == pytest.approx(0.01, rel=0.1)
  assert json.loads((copied / "summary.json").read_text())["steps"] == 30
  assert yaml.safe_load((copied / "config.yaml").read_text())["train"]["steps"] == 30
  before = (copied / "metrics.jsonl").read_bytes()
  train(line, copied, "train.steps=30")  # finished
  assert before == (copied / "metrics.jsonl").read_bytes()
  refused(["train", *line, f"out={copied}"], ["train.steps: 30 there, 20 here"], capsys)


def test_a_run_goes_on_with_other_intervals(line, first, tmp_path):
  out = tmp_path / "run"
  train(line, out, "train.steps=10", UNTIL_20)
  often = [f"train.{key}=5" for key in ("log_every", "eval_every", "checkpoint_every", "max_skips")]
  free = ["train.keep_checkpoints=1", "data.workers=2", "train.profile_steps=[1, 2]", "train.trackers=[]"]
  free += ["train.export=safetensors", "train.export_dtype=bf16"]
  lines = train(line, out, "train.steps=20", UNTIL_20, *often, *free)
  logged = losses(line for line in lines if line["step"] > 10)
  assert logged == [line for line in losses(records(first)) if line[0] in (15, 20)]
  assert (out / "model.safetensors").exists()
  # Nothing is lost of a finished run: the same command with yet others has nothing to do.
  assert train(line, out, "train.steps=20", UNTIL_20) == lines


@pytest.mark.parametrize("policy", ["fp16", "bf16_pure"])
def test_a_new_run_starts_from_the_parameters_of_another(line, first, copied, tmp_path, capsys, policy):
  out = tmp_path / "run"
  options = [f"policy={policy}", f"train.init_from={copied}", "seed=5"]
  lines = train(line, out, *options, "train.steps=2")
  assert f"{out}, parameters of step 20 of {copied}" in capsys.readouterr().out
  begun, left = records(first)[0]["loss"], records(first)[-1]["loss"]
  assert lines[0]["loss"] < (begun + left) / 2
  assert rates(lines)[0] == pytest.approx(0.05)  # the schedule begins anew
  shutil.rmtree(copied)  # resumed, the other run is not needed
  assert [line["step"] for line in train(line, out, *options, "train.steps=4")] == [1, 2, 3, 4]


def test_policies_change_in_the_middle_of_a_run(line, first, tmp_path):
  """Losses of the second half are those of one run, but for the policy's rounding."""
  whole = records(first)
  (early, *_), late = [loss for _, loss in losses(whole)], np.mean([r["loss"] for r in whole[10:]])
  options = [UNTIL_20, "train.steps=10"]
  for before, after in [("fp16", "bf16"), ("fp32", "bf16_lean"), ("bf16_lean", "fp16")]:
    source = tmp_path / before
    if not source.exists():
      train(line, source, f"policy={before}", *options)
    start = [f"policy={after}", f"train.init_from={source}", "train.init_optimizer=true"]
    lines = train(line, tmp_path / f"{before}-{after}", *start, *options)
    np.testing.assert_allclose(rates(lines), rates(whole)[10:], rtol=1e-5, err_msg=f"{before} {after}")
    # The data begin anew, so losses are compared by their level.
    assert np.mean([r["loss"] for r in lines]) < late + 0.2 * (early - late), (before, after)
    assert all(r["skipped_steps"] == 0 for r in lines), (before, after)


def test_a_run_continues_exactly_but_for_its_data(line, first):
  """Parameters and the state of the optimiser are the other's: one step from both is the same, on one batch."""
  options = [*line[1:], f"train.init_from={first}", "train.init_optimizer=true"]
  setup = make_setup(load_config(line[0], options))
  state, _ = start_from(setup, setup.first_state())
  assert_same_bits(state, state_of(first))
  assert int(state.step) == 0


def test_skipped_steps_of_the_first_run_are_not_counted(line, tmp_path):
  options = ["policy={base: fp16, loss_scaling: 1.0e+30}", "train.steps=3"]  # every gradient overflows
  assert train(line, tmp_path / "one", *options)[-1]["skipped_steps"] == 3
  start = [f"train.init_from={tmp_path / 'one'}", "train.init_optimizer=true"]
  assert train(line, tmp_path / "two", *options, *start)[0]["skipped_steps"] == 1


def test_a_new_run_starts_from_an_export(line, first, tmp_path, capsys):
  by_run = train(line, tmp_path / "by_run", f"train.init_from={first}", "train.steps=1")
  for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-2)):
    file = tmp_path / f"{dtype}.safetensors"
    assert main(["export", str(first), f"out={file}", f"dtype={dtype}", "step=latest"]) == 0
    lines = train(line, tmp_path / dtype, f"train.init_from={file}", "train.steps=1")
    assert f"parameters of {file}" in capsys.readouterr().out
    assert lines[0]["loss"] == pytest.approx(by_run[0]["loss"], abs=tolerance)


def test_over_eight_devices_too_and_resumed_on_another_mesh_with_the_other_gather(line, first, tmp_path):
  options = [f"train.init_from={first}", "train.init_optimizer=true", UNTIL_20]
  one = train(line, tmp_path / "one", *options, "train.steps=4")
  for steps, mesh in ((2, "{data: 2, fsdp: 4, gather: block}"), (4, "{data: 1, fsdp: 8, gather: step}")):
    eight = train(line, tmp_path / "eight", *options, f"train.steps={steps}", f"mesh={mesh}")
  for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
    np.testing.assert_allclose([r[key] for r in eight], [r[key] for r in one], rtol=tolerance)


def test_what_cannot_be_started_from_is_one_line(line, first, tmp_path, capsys):
  file, empty = tmp_path / "x.safetensors", tmp_path / "empty"
  assert main(["export", str(first), f"out={file}"]) == 0
  (empty / "checkpoints").mkdir(parents=True)
  shutil.copy(first / "config.yaml", empty)
  out = f"out={tmp_path / 'run'}"
  for options, words in [
    (["train.init_from=/nowhere"], ["train.init_from=/nowhere", "run directory", "mpjax export"]),
    ([f"train.init_from={first}", "model.columns=5"], ["train.init_from=", "of another state"]),
    ([f"train.init_from={file}", "model.columns=5"], ["train.init_from=", "params", "same model section"]),
    ([f"train.init_from={file}", "train.init_optimizer=true"], ["init_optimizer", "only parameters"]),
    (["train.init_optimizer=true"], ["train.init_optimizer=true", "train.init_from"]),
    ([f"train.init_from={first}", "train.init_optimizer=true", "optimizer.name=lion"], ["another optimizer"]),
    ([f"train.init_from={empty}"], ["train.init_from=", "no checkpoint"]),
  ]:
    refused(["train", *line, out, *options], words, capsys)
  # A start that failed leaves its directory to the next.
  assert len(train(line, tmp_path / "run", f"train.init_from={first}", "train.steps=1")) == 1
  written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
  assert written["train"]["init_from"] == str(first)
