"""Optimisers of a plug-in: `optimizer.target`, `mpjax.train.register_optimizer`."""

import pytest
import yaml

from mpjax.cli import main
from mpjax.train import load_safetensors
from mpjax.train._kinds import TARGETS
from tests.train._tiny_gpt import records, write_tiny_gpt

PLUGIN = """
import optax
import mpjax

@mpjax.train.register_optimizer("signed")
def signed(learning_rate, *, momentum: float = 0.9, decay: float):
  return optax.chain(optax.trace(momentum), optax.add_decayed_weights(decay), optax.scale_by_sign(),
                     optax.scale_by_learning_rate(learning_rate))

@mpjax.train.register_optimizer("nothing")
def nothing(learning_rate):
  return 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
  monkeypatch.setattr(TARGETS, "_kinds", {})
  (tmp_path / "optimizers.py").write_text(PLUGIN)
  return ["--plugin", str(tmp_path / "optimizers.py")]


@pytest.fixture
def tiny(tmp_path):
  (tmp_path / "tiny").mkdir()
  return [*write_tiny_gpt(tmp_path / "tiny"), "model.dropout=0", "train.checkpoint_every=5"]


@pytest.mark.slow
def test_it_trains_resumes_and_is_exported(plugin, tiny, tmp_path, capsys, monkeypatch):
  chosen = ["optimizer.target=signed", "optimizer.options.decay=0.01", "optimizer.learning_rate=1e-3"]
  steps = "optimizer.schedule_steps=20"
  assert main(["train", *tiny, *plugin, *chosen, steps, f"out={tmp_path / 'whole'}"]) == 0
  assert "signed, learning rate 0.001, warm-up" in capsys.readouterr().out
  for count in (10, 20):
    out = [f"train.steps={count}", f"out={tmp_path / 'parts'}"]
    assert main(["train", *tiny, *plugin, *chosen, steps, *out]) == 0
  whole, parts = records(tmp_path / "whole"), records(tmp_path / "parts")
  for key in ("loss", "learning_rate", "grad_norm"):
    assert [line[key] for line in whole] == [line[key] for line in parts]
  assert whole[-1]["loss"] < whole[0]["loss"]
  written = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["optimizer"]
  assert (written["name"], written["target"]) == (None, "signed")
  assert written["options"] == {"momentum": 0.9, "decay": 0.01}
  assert main(["export", str(tmp_path / "whole"), *plugin]) == 0
  monkeypatch.setattr(TARGETS, "_kinds", {})
  assert load_safetensors(tmp_path / "whole" / "model.safetensors").config.model.kind == "gpt"
  assert main(["export", str(tmp_path / "whole")]) == 2
  assert "--plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (["optimizer.target=singed"], ["optimizer.target 'singed'", "did you mean 'signed'", "--plugin"]),
    (["optimizer.target=signed"], ["missing key 'optimizer.options.decay'", "optimizer.target=signed needs"]),
    (
      ["optimizer.target=signed", "optimizer.options={decay: 1, momentun: 1}"],
      ["unknown key 'optimizer.options.momentun'", "did you mean 'momentum'"],
    ),
    (["optimizer.target=signed", "optimizer.options.decay=much"], ["optimizer.options.decay='much'"]),
    (["optimizer.target=nothing"], ["returned a int", "optax transform"]),
    (["optimizer.target=nothing", "optimizer.options.x=1"], ["optimizer.options.x", "it has none"]),
    (["optimizer.target=nothing", "optimizer.name=lion"], ["name='lion' beside target='nothing'"]),
    (
      ["optimizer.target=nothing", "optimizer.name=adamw"],
      ["'adamw' beside target", "null takes back the name"],
    ),
    (["optimizer.name=null"], ["unknown optimizer.name None", "adamw"]),
    (["optimizer.name=signed"], ["optimizer.name 'signed'", "optimizer.target"]),
  ],
)
def test_what_is_wrong_is_one_line(plugin, tiny, tmp_path, capsys, options, words):
  assert main(["train", *tiny, *plugin, *options, f"out={tmp_path / 'run'}"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1, error
  assert all(word in error for word in words), error


def test_without_the_plugin_a_config_says_how_it_comes(tiny, capsys):
  assert main(["train", *tiny, "optimizer.target=signed"]) == 2
  assert capsys.readouterr().err == (
    "error: unknown optimizer.target 'signed': a target of your own needs --plugin FILE.py or --plugin "
    "package.module on every command, as a config never loads code (in Python: mpjax.train.load_plugins)\n"
  )
