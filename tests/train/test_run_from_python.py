"""`mpjax.train.run`: what the command does, from Python; what is shown; what `mpjax.train` has."""

import io
import json

import numpy as np
import pytest
import rich.console

import mpjax
from mpjax.cli import main
from mpjax.train import ConfigError, load_config, load_plugins

# A bar by itself, without a run.
from mpjax.train.loop._output import Output, Progress
from tests.train._own_config import PLUGIN
from tests.train._tiny_gpt import records

CONFIG = {
  "policy": "bf16",
  "model": {"kind": "own_plain"},
  "data": {"kind": "blobs", "batch_size": 16},
  "mesh": {"data": 1},
  "train": {"steps": 3, "log_every": 1},
}


def losses(directory):
  return [record["loss"] for record in records(directory)]


def test_it_does_what_the_command_does(tmp_path, capsys):
  file = tmp_path / "own.yaml"
  file.write_text(json.dumps(CONFIG))
  result = mpjax.train.run(file, ["train.steps=2", f"out={tmp_path / 'a'}"], plugins=[PLUGIN])
  assert "run finished" in capsys.readouterr().out
  assert main(["train", str(file), "train.steps=2", f"out={tmp_path / 'b'}", "--plugin", PLUGIN]) == 0
  assert result.directory == tmp_path / "a"
  assert losses(tmp_path / "a") == losses(tmp_path / "b")
  assert (result.steps, result.final_loss) == (2, losses(tmp_path / "b")[-1])
  assert np.isfinite(result.eval_loss)
  assert result.summary == json.loads((tmp_path / "a" / "summary.json").read_text())
  assert result.export is None
  assert repr(result).startswith(f"RunResult({tmp_path / 'a'}: 2 steps, loss ")


def test_it_takes_a_mapping_and_a_config(tmp_path):
  load_plugins([PLUGIN])
  assert load_config(CONFIG).out == "runs/own_plain-bf16"
  quiet = rich.console.Console(quiet=True)
  tree = CONFIG | {"policy": mpjax.get_policy("fp16"), "train": {"steps": 2, "export": "safetensors"}}
  first = mpjax.train.run(tree, [f"out={tmp_path / 'a'}"], console=quiet)
  second = mpjax.train.run(load_config(tree, [f"out={tmp_path / 'b'}"]), console=quiet)
  assert losses(first.directory) == losses(second.directory)
  assert first["resolved_policy"]["compute_dtype"] == "float16"
  assert first.export == tmp_path / "a" / "model.safetensors"


def test_what_is_wrong_is_raised():
  for plugins in ([PLUGIN], PLUGIN):
    with pytest.raises(ConfigError, match="unknown key 'trian'"):
      mpjax.train.run(CONFIG | {"trian": 3}, plugins=plugins)


def test_without_a_terminal_a_line_says_that_the_step_is_compiled():
  console = rich.console.Console(file=io.StringIO())
  with Output(console), Progress(console, steps=10, start=0, units="tokens", has_scale=True):
    pass
  assert console.file.getvalue() == "compiling the training step\n"
