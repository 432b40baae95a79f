"""Runs under FP8 policies, and with weights and optimiser state in few bytes: resumed, exported, on a mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import mpjax
from mpjax.cli import main
from mpjax.optim import Quantized, is_quantized
from mpjax.train import load_config, load_safetensors, make_setup
from mpjax.train.checkpoints import Checkpoints
from tests.train import _runs
from tests.train._runs import curve, train, train_until_killed

LENGTH = 4
POLICIES = {
  "delayed": f"policy={{base: fp8, fp8: {{emulate: true, recipe: delayed, amax_history_len: {LENGTH}}}}}",
  "current": "policy={base: fp8, fp8: {emulate: true}}",
}
# Of a run of two layers: the products of `up` are FP8 then, those of the last layer are not.
SMALL = ["policy.fp8.min_dim=16", "policy.fp8.first_layer=true"]
FLAT = {
  "model": {"kind": "flat"},
  "data": {"kind": "digits", "batch_size": 16, "eval_batches": 1},
  "train": {"steps": 8, "log_every": 1, "eval_every": 8, "checkpoint_every": 3},
}


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
  """Arguments of a run of two layers on images as they lie in memory."""

  def model(info):
    init = lambda key: {"up": jax.random.normal(key, (64, 64)) / 8, "head": np.zeros((64, 16), np.float32)}
    logits = lambda params, x: jax.nn.relu(x.reshape(-1, 64) @ params["up"]) @ params["head"]

    def loss_fn(params, batch):
      return ((logits(params, batch["images"]) - jax.nn.one_hot(batch["labels"], 16)) ** 2).mean()

    return mpjax.train.Task(init, loss_fn, logits=logits)

  mpjax.train.register_model("flat")(model)
  return _runs.write_line(tmp_path_factory.mktemp("flat"), **FLAT)


def test_a_killed_run_resumes_bit_for_bit(flat, tmp_path, capsys):
  arguments, out = [*flat, POLICIES["delayed"], *SMALL], tmp_path / "run"
  train(arguments, tmp_path / "whole")
  in_force = "delayed scaling, E4M3FN forward, E5M2 backward, emulated"
  assert in_force in capsys.readouterr().out
  assert json.loads((tmp_path / "whole" / "summary.json").read_text())["fp8"] == in_force
  train_until_killed(arguments, out, 5)
  train(arguments, out)
  assert "resumed after step 3" in capsys.readouterr().out
  assert curve(out) == curve(tmp_path / "whole")
  state = _runs.state_of(out)
  _runs.assert_same_bits(state, _runs.state_of(tmp_path / "whole"))
  histories = jax.tree.leaves(state.fp8_state["amax"])
  assert len(histories) == 3
  assert all(h.shape == (LENGTH,) and np.count_nonzero(h) == LENGTH for h in histories)


def test_without_units_a_run_is_one_of_bfloat16_and_says_so_once(flat, tmp_path, capsys):
  with pytest.warns(UserWarning, match=r"cpu has no FP8 units: they run in bfloat16") as said:
    train(flat, tmp_path / "run", "train.steps=1", "policy=fp8")
  # Python shows those of one place once: the evaluation is traced too.
  assert len({(str(w.message), w.filename, w.lineno) for w in said}) == 1
  assert "fp8  none, cpu has no FP8 units" in capsys.readouterr().out


def test_a_checkpoint_knows_of_fp8_only_where_there_is_a_state(flat, tmp_path):
  fields = {}
  for name, policy in {"bf16": "policy=bf16", **POLICIES}.items():
    setup = make_setup(load_config(flat[0], [policy, *(SMALL if name in POLICIES else [])]))
    checkpoints = Checkpoints(tmp_path / name)
    checkpoints.save(1, setup.first_state(), {}, {}, None)
    checkpoints.close()
    fields[name] = "fp8_state" in next((tmp_path / name).rglob("state/_METADATA")).read_text()
  assert fields == {"bf16": False, "current": False, "delayed": True}


# Weights and optimiser state in few bytes.

FEW_BYTES = [
  "bf16_lean",
  pytest.param(
    "{base: fp16, optimizer_dtype: int8, loss_scaling: {growth_interval: 2}}", marks=pytest.mark.slow
  ),
  pytest.param("{base: bf16_pure, master_weights: int16}", marks=pytest.mark.slow),
]
ON_EIGHT = "mesh={data: 2, fsdp: 4}"


@pytest.fixture(scope="module", params=FEW_BYTES)
def runs(request, flat, tmp_path_factory):
  """Directories of a run of 4 steps, and of one that was resumed in its middle; the arguments of both."""
  folder = tmp_path_factory.mktemp("runs")
  options = ["train.eval_every=4", "train.checkpoint_every=2", "optimizer.schedule_steps=6"]
  arguments = [*flat, *options, f"policy={request.param}"]
  for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
    train(arguments, folder / name, f"train.steps={steps}")
  return folder / "whole", folder / "parts", arguments


def step_of(run):
  return make_setup(load_config(run / "config.yaml", [])).step


def quantized(state):
  return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_quantized) if isinstance(x, Quantized)]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs):
  whole, parts, arguments = runs
  first = _runs.state_of(whole)
  _runs.assert_same_bits(first, _runs.state_of(parts))
  assert bool(quantized(first)) == ("int8" in arguments[-1] or "lean" in arguments[-1])
  has_corrections = step_of(whole).layers(first).masters is not None
  assert has_corrections == ("master" in arguments[-1] or "lean" in arguments[-1])


def test_codes_are_divided_as_their_parameters_are_and_stay_the_same_on_another_mesh(runs):
  state = _runs.state_of(runs[0], ON_EIGHT)
  _runs.assert_same_bits(_runs.state_of(runs[0]), state)
  assert all(isinstance(x.codes.sharding, NamedSharding) for x in quantized(state))
  assert not any(x.codes.sharding.is_fully_replicated for x in quantized(state))


def test_an_export_in_float32_is_of_the_master_weights(runs, tmp_path):
  state = _runs.state_of(runs[0])
  masters = step_of(runs[0]).masters(state)
  for dtype, expected in (("float32", masters), ("bfloat16", state.params)):
    file = tmp_path / f"{dtype}.safetensors"
    assert main(["export", str(runs[0]), f"dtype={dtype}", "step=latest", f"out={file}"]) == 0
    model = load_safetensors(file)
    for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(jnp.dtype(dtype)))
    assert np.isfinite(np.asarray(model.logits(np.zeros((1, 8, 8), np.float32)))).all()
