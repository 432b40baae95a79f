"""Models and data of a user's own, in each of three ways: a run's whole life, and what is wrong in one line."""

import collections
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
import yaml

import mpjax
from mpjax.cli import main

# What is registered is to be forgotten.
from mpjax.registry import TARGETS
from mpjax.train import ConfigError, load_config, load_plugins, load_safetensors, make_setup
from mpjax.train.setup._experiment import Setup
from tests.train import _runs
from tests.train._runs import PLUGIN, curve, raises_one_line, refused, train_until_killed, write_config

OF_FILE = ["--plugin", PLUGIN]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["linen", "nnx"])  # parameters and a state; a module
def test_a_killed_run_resumes_bit_for_bit(kind, tmp_path):
  arguments = [write_config(tmp_path, kind), *OF_FILE]
  _runs.train(arguments, tmp_path / "whole")
  train_until_killed(arguments, tmp_path / "run", 7)
  _runs.train(arguments, tmp_path / "run")
  assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_an_error_of_a_models_own_files_is_none_of_the_runs(tmp_path, monkeypatch):
  def lost(setup):
    raise ConnectionError("the feature store")

  load_plugins([PLUGIN])
  monkeypatch.setattr(Setup, "first_state", lost)
  with pytest.raises(ConnectionError, match="feature store"):
    mpjax.train.run(write_config(tmp_path, "linen"), [f"out={tmp_path / 'run'}"])


@pytest.mark.parametrize("kind", ["linen", "nnx", "plain"])
def test_a_config_is_explained_and_planned_for_a_device_that_is_not_here(kind, tmp_path, capsys):
  config, file = write_config(tmp_path, kind), tmp_path / "plan.json"
  assert main(["explain", config, *OF_FILE]) == 0
  assert "float16" in capsys.readouterr().out
  arguments = [config, "policy=fp32,bf16", "target=h200", "mesh.data=-1"]
  assert main(["plan", *arguments, *OF_FILE, "--analytic", "--json", str(file)]) == 0
  assert [plan["label"] for plan in json.loads(file.read_text())["plans"]] == ["fp32", "bf16"]
  assert f"own_{kind}" in capsys.readouterr().out


def test_the_resolved_config_has_every_option_and_no_code(tmp_path):
  load_plugins([PLUGIN])
  config = load_config(write_config(tmp_path, "linen"), ["model.width=16"])
  tree = yaml.safe_load(config.to_yaml())
  assert tree["model"] == {"kind": "own_linen", "width": 16, "dropout": 0.1}
  assert tree["data"]["classes"] == 4
  assert "_own_models" not in config.to_yaml()
  assert load_config(tree) == load_config(load_config(tree))


COMMANDS_WITHOUT_PLUGIN = """
import sys
from mpjax.cli import main
config, run = sys.argv[1:]
statuses = [main(["train", config]), main(["export", run]), main(["numerics", run]), main(["explain", config])]
assert statuses == [2, 2, 2, 2], statuses
assert main(["explain", config, "--plugin", "tests.train._own_models"]) == 0
"""


@pytest.mark.slow
def test_a_run_directory_runs_no_code_by_itself(tmp_path):
  """In a process of its own, where nothing is registered."""
  config = write_config(tmp_path, "plain")
  directory = tmp_path / "run"
  assert main(["train", config, *OF_FILE, "train.steps=2", f"out={directory}"]) == 0
  command = [sys.executable, "-c", COMMANDS_WITHOUT_PLUGIN, config, str(directory)]
  out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  assert out.returncode == 0, out.stderr
  lines = out.stderr.splitlines()
  assert len(lines) == 4
  assert all("unknown model.kind 'own_plain'" in line and "--plugin FILE.py" in line for line in lines), lines


REGISTERED = "import mpjax\n@mpjax.train.register_"


def test_a_plugin_that_cannot_be_used_is_one_line(tmp_path, capsys):
  for text, words in [
    ("import nothing_of_that_name", ["ModuleNotFoundError", "nothing_of_that_name", "(own.py:1)"]),
    ("\nx = 1 / 0", ["ZeroDivisionError", "(own.py:2)"]),
    ("def (", ["SyntaxError", "own.py"]),
    (REGISTERED + "model('x')\ndef x(info, width=3): ...", ["by position", "after *", "own.py"]),
    (REGISTERED + "model('x')\ndef x(info, **options): ...", ["keys without a name"]),
    (REGISTERED + "data('x')\ndef x(*, batch_size: int = 3): ...", ["'batch_size'"]),
    (REGISTERED + "model('gpt')\ndef x(info): ...", ["'gpt'", "choose another"]),
    (REGISTERED + "model('x')\ndef x(info, *, act: int = max): ...", ["act: int", "plain data"]),
    (REGISTERED + "model('x')\ndef x(info, *, n: 'Nope' = 3): ...", ["'Nope'"]),
  ]:
    (tmp_path / "own.py").write_text(text)
    refused(["explain", "gpt_stdlib", "--plugin", str(tmp_path / "own.py")], words, capsys)
  for name in ("nowhere.py", "no_such_package.module", "."):
    refused(["explain", "gpt_stdlib", "--plugin", name], [f"--plugin {name}"], capsys)


def test_a_plugin_that_replaces_a_kind_of_another_says_so(tmp_path, caplog):
  for name in ("a", "b"):
    (tmp_path / f"{name}.py").write_text(REGISTERED + "data('twice')\ndef twice(): ...")
    load_plugins([str(tmp_path / f"{name}.py")] * 2)
  assert [record.message for record in caplog.records] == [
    "warning: register_data('twice'): mpjax_plugin_b replaces what mpjax_plugin_a registered"
  ]


CONFIG = {
  "policy": "bf16",
  "model": {"kind": "own_plain"},
  "data": {"kind": "blobs", "batch_size": 16},
  "mesh": {"data": 1},
  "train": {"steps": 3, "log_every": 1},
}


def test_it_does_what_the_command_does(tmp_path, capsys):
  file = tmp_path / "own.yaml"
  file.write_text(json.dumps(CONFIG))
  result = mpjax.train.run(file, ["train.steps=2", f"out={tmp_path / 'a'}"], plugins=[PLUGIN])
  assert "run finished" in capsys.readouterr().out
  assert main(["train", str(file), "train.steps=2", f"out={tmp_path / 'b'}", "--plugin", PLUGIN]) == 0
  assert result.directory == tmp_path / "a"
  assert curve(tmp_path / "a") == curve(tmp_path / "b")
  assert (result.steps, result.final_loss) == (2, curve(tmp_path / "b")[-1][1])
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
  assert curve(first.directory) == curve(second.directory)
  assert first["resolved_policy"]["compute_dtype"] == "float16"
  assert first.export == tmp_path / "a" / "model.safetensors"


def test_what_is_wrong_is_raised():
  for plugins in ([PLUGIN], PLUGIN):
    with pytest.raises(ConfigError, match="unknown key 'trian'"):
      mpjax.train.run(CONFIG | {"trian": 3}, plugins=plugins)


def task(**changes):
  return mpjax.train.Task(**({"init": lambda key: {"w": jax.numpy.ones(8)}, "loss_fn": loss_fn} | changes))


def loss_fn(params, batch):
  return ((batch["x"] @ params["w"]) ** 2).mean()


def train(folder, make, **options):
  """Runs a model made by a function on the blobs, and returns the result."""
  load_plugins([PLUGIN])
  mpjax.train.register_model("of_a_test")(make)
  config = CONFIG | {"out": str(folder / "run"), "model": {"kind": "of_a_test"}, "train": {"steps": 2}}
  return mpjax.train.run(config | options)


def test_without_evaluate_the_evaluation_is_the_loss(tmp_path):
  result = train(tmp_path, lambda info: task(), optimizer={"name": "sgd", "learning_rate": 1e-9})
  setup = make_setup(load_config(result.directory / "config.yaml"))
  batches = [batch["x"] for batch in setup.data.eval()]
  expected = np.mean([(batch.sum(-1) ** 2).mean() for batch in batches])
  assert result.eval_loss == pytest.approx(expected, rel=0.02)


def test_an_evaluation_gives_metrics(tmp_path):
  for number, evaluate in enumerate(
    [
      lambda params, batch: (loss_fn(params, batch), {"doubled": 2 * loss_fn(params, batch)}),
      lambda params, batch: {"loss": loss_fn(params, batch), "doubled": 2 * loss_fn(params, batch)},
      lambda params, batch: {"eval_loss": loss_fn(params, batch), "eval_doubled": 2 * loss_fn(params, batch)},
    ]
  ):
    result = train(tmp_path / str(number), lambda info: task(evaluate=evaluate))
    assert result["eval_doubled"] == pytest.approx(2 * result.eval_loss, rel=0.02), number


def test_parameters_may_be_a_pair_of_names_or_one_array(tmp_path):
  """Only a plain tuple is (params, model_state)."""
  Weights = collections.namedtuple("Weights", "w b")
  make = lambda info: mpjax.train.Task(
    init=lambda key: Weights(jax.numpy.ones(8), jax.numpy.zeros(())),
    loss_fn=lambda params, batch: ((batch["x"] @ params.w + params.b) ** 2).mean(),
  )
  assert train(tmp_path / "pair", make).summary["parameters"] == 9
  make = lambda info: mpjax.train.Task(
    init=lambda key: jax.numpy.ones(8), loss_fn=lambda params, batch: ((batch["x"] @ params) ** 2).mean()
  )
  result = train(tmp_path / "one", make, train={"steps": 2, "export": "safetensors"})
  assert load_safetensors(result.export).params.shape == (8,)


UNFIT = [
  (lambda info: 3, ["returned a int", "mpjax.train.Task"]),
  (lambda info: task(init=lambda key: {"w": np.ones(8, np.int32)}), ["'w'", "int32", "model_state"]),
  (lambda info: task(init=lambda key: ({"w": np.ones(8, np.float32)}, {})), ["model_state"]),
  (lambda info: task(sharding={"v": ("fsdp",)}), ["sharding rule 'v' matches no parameter", "parameters: w"]),
  (lambda info: task(sharding={"w": ("fdsp",)}), ["sharding rule 'w'", "expected fsdp, tensor or null"]),
  (lambda info: task() if info.hight else None, ["'hight'", "classes, features", "x, y"]),
  (
    lambda info: task(loss_fn=lambda params, batch: params["w"][0] * info.hight),
    ["'hight'", "classes, features"],
  ),
  (lambda info: task(loss_fn=lambda params, batch: batch["x"] @ params["w"]), ["float32[16]", "scalar"]),
  (lambda info: task(evaluate=lambda params, batch: {"a": params["w"][0]}), ["eval_a", "a loss among"]),
]


def test_a_model_that_does_not_fit_is_one_line(tmp_path):
  for make, words in UNFIT:
    raises_one_line(ConfigError, words, train, tmp_path, make)
    assert not (tmp_path / "run").exists(), words


def test_a_model_is_told_where_it_is_wrong(tmp_path):
  (tmp_path / "own.py").write_text(
    "import mpjax\n@mpjax.train.register_model('odd')\ndef odd(info, *, dim: int = 3):\n"
    "  if dim % 2:\n    raise ValueError(f'dim={dim} is odd')\n"
  )
  load_plugins([PLUGIN, str(tmp_path / "own.py")])
  with pytest.raises(ConfigError, match=r"^model: dim=3 is odd \(own\.py:5\)$"):
    make_setup(load_config({"model": {"kind": "odd"}, "data": {"kind": "blobs"}}))


def test_what_is_traced_to_be_checked_is_not_traced_again(tmp_path):
  traced = []

  def counted(params, batch):
    traced.append(batch)
    return loss_fn(params, batch)

  make = lambda info: task(loss_fn=counted, evaluate=loss_fn)
  train(tmp_path, make, train={"steps": 3, "eval_every": 1})
  assert len(traced) == 1


def test_a_task_says_what_it_takes():
  for changes in ({"loss_fn": 3}, {"units": "tokens"}, {"sharding": "fsdp"}, {"logits": 3}):
    with pytest.raises(TypeError, match=f"{min(changes)}=.*expected"):
      task(**changes)


def test_a_model_says_where_its_parameters_lie(tmp_path):
  load_plugins([PLUGIN])
  overrides = ["mesh={data: 1, fsdp: 4}", "model.width=64"]
  setup = make_setup(load_config(write_config(tmp_path, "linen"), overrides))
  shardings = setup.shapes()[0].params
  assert shardings["up"]["kernel"].sharding.spec == jax.P(None, "fsdp")
  assert shardings["head"]["kernel"].sharding.spec == jax.P("fsdp")


# Optimisers: `optimizer.target`.

OPTIMIZERS = """
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
def optimizers(tmp_path, monkeypatch):
  monkeypatch.setattr(TARGETS, "by_name", {})
  (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
  return ["--plugin", str(tmp_path / "optimizers.py")]


@pytest.fixture
def line(tmp_path):
  (tmp_path / "line").mkdir()
  return _runs.write_line(tmp_path / "line")


def test_an_optimizer_trains_resumes_and_is_exported(optimizers, line, tmp_path, capsys, monkeypatch):
  chosen = ["optimizer.target=signed", "optimizer.options.decay=0.01", "optimizer.schedule_steps=20"]
  command = [*line, *optimizers, *chosen]
  lines = _runs.train(command, tmp_path / "whole")
  assert "signed, learning rate 0.1, warm-up" in capsys.readouterr().out
  for count in (10, 20):
    _runs.train(command, tmp_path / "parts", f"train.steps={count}")
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  assert lines[-1]["loss"] < lines[0]["loss"]
  written = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["optimizer"]
  assert (written["name"], written["target"]) == (None, "signed")
  assert written["options"] == {"momentum": 0.9, "decay": 0.01}
  assert main(["export", str(tmp_path / "whole"), *optimizers]) == 0
  monkeypatch.setattr(TARGETS, "by_name", {})
  assert load_safetensors(tmp_path / "whole" / "model.safetensors").config.model.kind == "line"
  refused(["export", str(tmp_path / "whole")], ["--plugin"], capsys)


UNFIT_OPTIMIZERS = [
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
  (["target=nothing", "weight_decay=0.1"], ["optimizer.weight_decay=0.1: expected 0"]),
  (["name=null"], ["unknown optimizer.name None", "adamw"]),
  (["name=signed"], ["optimizer.name 'signed'", "optimizer.target"]),
]


def test_an_optimizer_that_does_not_fit_is_one_line(optimizers, line, tmp_path, capsys):
  for options, words in UNFIT_OPTIMIZERS:
    options = [f"optimizer.{option}" for option in options]
    refused(["train", *line, *optimizers, *options, f"out={tmp_path / 'run'}"], words, capsys)


def test_without_the_plugin_a_config_says_how_it_comes(line, capsys, monkeypatch):
  monkeypatch.setattr(TARGETS, "by_name", {})
  assert main(["train", *line, "optimizer.target=signed"]) == 2
  assert capsys.readouterr().err == (
    "error: unknown optimizer.target 'signed': a target of your own needs --plugin FILE.py or --plugin "
    "package.module on every command, as a config never loads code (in Python: mpjax.train.load_plugins)\n"
  )
