"""Optimisers of a plug-in: `optimizer.target`, `mpjax.train.register_optimizer`."""

import pytest
import yaml

from mpjax.cli import main

# What is registered is to be forgotten.
from mpjax.registry._kinds import TARGETS
from mpjax.train import load_safetensors
from tests.train._runs import curve, refused, train, write_line

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

@mpjax.train.register_optimizer("picky")
def picky(learning_rate, *, alpha: float = 5.0):
  if alpha < 0:
    raise ValueError("alpha must be positive")
  return optax.sgd(learning_rate)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
  monkeypatch.setattr(TARGETS, "_kinds", {})
  (tmp_path / "optimizers.py").write_text(PLUGIN)
  return ["--plugin", str(tmp_path / "optimizers.py")]


@pytest.fixture
def line(tmp_path):
  (tmp_path / "line").mkdir()
  return write_line(tmp_path / "line")


def test_it_trains_resumes_and_is_exported(plugin, line, tmp_path, capsys, monkeypatch):
  chosen = ["optimizer.target=signed", "optimizer.options.decay=0.01", "optimizer.schedule_steps=20"]
  command = [*line, *plugin, *chosen]
  lines = train(command, tmp_path / "whole")
  assert "signed, learning rate 0.1, warm-up" in capsys.readouterr().out
  for count in (10, 20):
    train(command, tmp_path / "parts", f"train.steps={count}")
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  assert lines[-1]["loss"] < lines[0]["loss"]
  written = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["optimizer"]
  assert (written["name"], written["target"]) == (None, "signed")
  assert written["options"] == {"momentum": 0.9, "decay": 0.01}
  assert main(["export", str(tmp_path / "whole"), *plugin]) == 0
  monkeypatch.setattr(TARGETS, "_kinds", {})
  assert load_safetensors(tmp_path / "whole" / "model.safetensors").config.model.kind == "line"
  refused(["export", str(tmp_path / "whole")], ["--plugin"], capsys)


WRONG = [
  (["target=singed"], ["optimizer.target 'singed'", "did you mean 'signed'", "--plugin"]),
  (["target=signed"], ["missing key 'optimizer.options.decay'", "optimizer.target=signed needs"]),
  (
    ["target=signed", "options={decay: 1, momentun: 1}"],
    ["unknown key 'optimizer.options.momentun'", "did you mean 'momentum'"],
  ),
  (["target=signed", "options.decay=much"], ["optimizer.options.decay='much'"]),
  (["target=nothing"], ["returned a int", "optax transform"]),
  (["target=picky", "options.alpha=-1"], ["target=picky: alpha must be positive (optimizers.py:"]),
  (["target=nothing", "options.x=1"], ["optimizer.options.x", "it has none"]),
  (["target=nothing", "name=lion"], ["name='lion' and target='nothing'"]),
  (["target=nothing", "name=adamw"], ["'adamw' and target", "name=null removes the name"]),
  (["name=null"], ["unknown optimizer.name None", "adamw"]),
  (["name=signed"], ["optimizer.name 'signed'", "optimizer.target"]),
]


def test_what_is_wrong_is_one_line(plugin, line, tmp_path, capsys):
  for options, words in WRONG:
    options = [f"optimizer.{option}" for option in options]
    refused(["train", *line, *plugin, *options, f"out={tmp_path / 'run'}"], words, capsys)


def test_without_the_plugin_a_config_says_how_it_comes(line, capsys, monkeypatch):
  monkeypatch.setattr(TARGETS, "_kinds", {})
  assert main(["train", *line, "optimizer.target=signed"]) == 2
  assert capsys.readouterr().err == (
    "error: unknown optimizer.target 'signed': a target of your own needs --plugin FILE.py or --plugin "
    "package.module on every command, as a config never loads code (in Python: mpjax.train.load_plugins)\n"
  )
