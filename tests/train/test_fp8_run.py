"""`mpjax train` and `mpjax explain` under FP8 policies: exact resume, errors, and what is said."""

import json

import jax
import numpy as np
import pytest

import mpjax
from mpjax.train import load_config, make_setup
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
    init = lambda key: {"up": jax.random.normal(key, (64, 32)) / 8, "head": np.zeros((32, 16), np.float32)}

    def loss_fn(params, batch):
      out = jax.nn.relu(batch["images"].reshape(16, 64) @ params["up"]) @ params["head"]
      return ((out - jax.nn.one_hot(batch["labels"], 16)) ** 2).mean()

    return mpjax.train.Task(init, loss_fn)

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
