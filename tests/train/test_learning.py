"""What the example configs learn in half precision, by `mpjax train`: as much as in float32."""

import json
import pathlib

import pytest

from mpjax.cli import main

# Most of their time they run.
pytestmark = [pytest.mark.optimised, pytest.mark.slow]
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def summary_of(config, out, *options):
  assert main(["train", str(CONFIGS / config), *options, "mesh.data=1", f"out={out}"]) == 0
  return json.loads((out / "summary.json").read_text())


def test_half_precision_ends_where_float32_does(tmp_path):
  overflowing = "{base: fp16, loss_scaling: {init_scale: 16777216, backoff_factor: 0.25}}"
  shape = ["model.dim=64", "model.layers=1", "data.seq_len=64", "data.batch_size=8", "data.eval_batches=10"]
  found = {
    policy: summary_of(
      "gpt_stdlib.yaml",
      tmp_path / str(number),
      *shape,
      f"policy={policy}",
      "train.steps=150",
      "train.eval_every=150",
    )
    for number, policy in enumerate(("fp32", "bf16", overflowing))
  }
  for policy, summary in found.items():
    assert summary["eval_loss"] == pytest.approx(found["fp32"]["eval_loss"], rel=0.01), policy
  assert found[overflowing]["skipped_steps"] > 1
