"""`mpjax tune` as a user meets it."""

import json

import pytest
import yaml

from mpjax.cli import main
from mpjax.train import load_config
from tests.train._tiny_gpt import write_tiny_gpt


@pytest.mark.slow
def test_a_policy_is_found_and_written(tmp_path, monkeypatch, capsys):
  [config] = write_tiny_gpt(tmp_path, layers=1)
  monkeypatch.chdir(tmp_path)
  arguments = ["tune", str(config), "target=l4", "model.dim=128", "steps=2", "batches=1"]
  assert main([*arguments, "--out", "tuned.yaml", "--json", "tune.json"]) == 0
  out = capsys.readouterr().out
  assert out.splitlines()[:3] == ["loading the data and the model", "training 2 steps in float32", "float32"]
  data = json.loads((tmp_path / "tune.json").read_text())
  assert data["target"] == "l4"
  tuned = load_config(tmp_path / "tuned.yaml")
  assert tuned.policy == yaml.safe_load(data["yaml"])["policy"]
  assert tuned.model == load_config(config, ["model.dim=128"]).model
  assert main(["train", "tuned.yaml", "train.steps=2", "out=run"]) == 0
  assert main(["tune", "run", "target=l4", "batches=1", "policy=bf16,fp32", "--json", "run.json"]) == 0
  assert {trial["label"] for trial in json.loads((tmp_path / "run.json").read_text())["table"]} >= {"bf16"}


WRONG = [
  ("target=h300", "unknown target 'h300'"),
  ("--tolerance small", "tolerance='small': expected a positive number"),
  ("--out there.yaml", "--out there.yaml: exists; it is not overwritten"),
  ("--json no/where.json", "--json no/where.json: cannot be written (No such file or directory)"),
  ("batches=0", "batches=0: expected a whole number from 1 on"),
  ("policy={base:bf16}", "tune chooses the policy"),
  ("target=h200:8 mesh.data=8 data.batch_size=12", "data.batch_size=12: expected a multiple of 8, which is"),
  ("train.stepz=3", "did you mean 'steps'"),
]


def test_a_wrong_line_is_one_error(tmp_path, monkeypatch, capsys):
  [config] = write_tiny_gpt(tmp_path, layers=1)
  (tmp_path / "there.yaml").touch()
  monkeypatch.chdir(tmp_path)
  for line, message in WRONG:
    assert main(["tune", str(config), "steps=0", "batches=1", *line.split()]) == 2, line
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error, line
