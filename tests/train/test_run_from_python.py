"""`mpjax.train.run`: what the command does, from Python; the bar in a notebook; what `mpjax.train` shows."""

import io
import json
import sys
import types

import numpy as np
import pytest
import rich.console

import mpjax
from mpjax.cli import main
from mpjax.train import ConfigError, load_config, load_plugins
from mpjax.train._display import Display
from tests.train._own_config import PLUGIN

CONFIG = {
  "policy": "bf16",
  "model": {"kind": "own_plain"},
  "data": {"kind": "blobs", "batch_size": 16},
  "mesh": {"data": 1},
  "train": {"steps": 4, "log_every": 1},
}


def losses(directory):
  return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "own.yaml"
  path.write_text(json.dumps(CONFIG))
  return path


def test_it_does_what_the_command_does(file, tmp_path, capsys):
  result = mpjax.train.run(file, ["train.steps=3", f"out={tmp_path / 'a'}"], plugins=[PLUGIN])
  assert "run finished" in capsys.readouterr().out
  assert main(["train", str(file), "train.steps=3", f"out={tmp_path / 'b'}", "--plugin", PLUGIN]) == 0
  assert result.directory == tmp_path / "a"
  assert losses(tmp_path / "a") == losses(tmp_path / "b")
  assert (result.steps, result.final_loss) == (3, losses(tmp_path / "b")[-1])
  assert np.isfinite(result.eval_loss)
  assert result.summary == json.loads((tmp_path / "a" / "summary.json").read_text())
  assert result.export is None
  assert repr(result).startswith(f"RunResult({tmp_path / 'a'}: 3 steps, loss ")


def test_it_takes_a_mapping_and_a_config(tmp_path):
  load_plugins([PLUGIN])
  quiet = rich.console.Console(quiet=True)
  tree = CONFIG | {"policy": mpjax.get_policy("fp16"), "train": {"steps": 2, "export": "safetensors"}}
  first = mpjax.train.run(tree, [f"out={tmp_path / 'a'}"], console=quiet)
  second = mpjax.train.run(load_config(tree, [f"out={tmp_path / 'b'}"]), console=quiet)
  assert losses(first.directory) == losses(second.directory)
  assert first["resolved_policy"]["compute_dtype"] == "float16"
  assert first.export == tmp_path / "a" / "model.safetensors"


def test_without_out_a_mapping_is_named_by_its_model(tmp_path):
  load_plugins([PLUGIN])
  assert load_config(CONFIG).out == "runs/own_plain-bf16"


def test_what_is_wrong_is_raised(tmp_path):
  with pytest.raises(ConfigError, match="unknown key 'trian'"):
    mpjax.train.run(CONFIG | {"trian": 3}, plugins=[PLUGIN])


def test_a_notebook_has_a_bar_that_moves(monkeypatch):
  shown = []

  class Cell:
    def update(self, progress):
      shown.append(progress._repr_mimebundle_([], [])["text/plain"])

  def display(progress, display_id):
    assert display_id
    return Cell()

  monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
  monkeypatch.setattr("mpjax.train._display._SECONDS", 0.0)
  console = rich.console.Console(file=io.StringIO(), force_jupyter=True)
  with Display(console, 10, 0, "rows", has_scale=False) as bar:
    for step in (1, 2):
      record = {"loss": 0.5, "loss_scale": 1.0, "skipped_steps": 0, "rows_per_s": 3.0, "step": step}
      bar.step(step, record, logged=True)
  assert len(shown) == 3
  assert "1/10" in shown[0]
  assert "2/10" in shown[-1]


def test_the_module_shows_its_public_names():
  assert dir(mpjax.train) == sorted(mpjax.train.__all__)
  assert {"Task", "register_data", "register_model", "run"} <= set(dir(mpjax.train))
  assert all(getattr(mpjax.train, name) is not None for name in dir(mpjax.train))
  assert set(dir(mpjax)) >= {*mpjax.__all__, "train"}
  assert not {"Any", "importlib", "_tree"} & set(dir(mpjax))
