"""Runs whose parameters are gathered where they are read: the losses of others, and resumed as others."""

import numpy as np
import pytest

from mpjax.cli import main
from tests.train._tiny_gpt import records, write_tiny_gpt


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_and_with_the_other_gather(tmp_path):
  options = ["train.eval_every=6", "train.checkpoint_every=3", "optimizer.schedule_steps=6", "policy=fp32"]
  arguments = [*write_tiny_gpt(tmp_path, layers=1), *options]
  one, parts = tmp_path / "one", tmp_path / "parts"
  runs = [
    (one, 6, "mesh={data: 1}"),
    (parts, 3, "mesh={data: 2, fsdp: 4, gather: block}"),
    (parts, 6, "mesh={data: 1, fsdp: 8, gather: step}"),
  ]
  for out, steps, mesh in runs:
    assert main(["train", *arguments, f"train.steps={steps}", f"out={out}", mesh]) == 0
  expected, found = ([record["loss"] for record in records(out)] for out in (one, parts))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
