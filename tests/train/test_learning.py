"""What the example configs learn in half precision, by `scripts/train.py`: as much as in float32."""

import json
import pathlib

import pytest

from mpjax.cli import main

# Most of their time they run.
pytestmark = pytest.mark.optimised
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "steps"), [("vit_digits", 300), ("resnet_digits", 80)])
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.slow
def test_digits_are_learnt_under_every_policy(name, steps, policy, tmp_path):
  config = str(ROOT / "configs" / f"{name}.yaml")
  options = [f"policy={policy}", f"train.steps={steps}", f"train.eval_every={steps}", "mesh.data=1"]
  size = ["model.layers=2"] if name == "vit_digits" else []
  assert main(["train", config, *options, *size, f"out={tmp_path / 'run'}"]) == 0
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["eval_accuracy"] > 0.9


@pytest.mark.slow
def test_half_precision_ends_where_float32_does(tmp_path):
  overflowing = "{base: fp16, loss_scaling: {init_scale: 16777216, backoff_factor: 0.25}}"
  policies = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16 from 2^24": overflowing}
  shape = ["model.dim=64", "model.layers=1", "data.seq_len=64", "data.batch_size=8", "mesh.data=1"]
  summaries = {}
  for name, policy in policies.items():
    out = tmp_path / name.replace(" ", "_")
    config = [str(ROOT / "configs/gpt_stdlib.yaml"), *shape, "train.steps=300", "train.eval_every=300"]
    assert main(["train", *config, f"policy={policy}", f"out={out}"]) == 0
    summaries[name] = json.loads((out / "summary.json").read_text())
  base = summaries["fp32"]["eval_loss"]
  assert {name: s["eval_loss"] / base for name, s in summaries.items()} == {
    name: pytest.approx(1, abs=0.01) for name in policies
  }
  assert summaries["fp16 from 2^24"]["skipped_steps"] > 1
