"""Models and data of a user's own, in each of five ways: a run's whole life, and what is wrong in one line."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml

import mpjax
from mpjax.cli import main
from mpjax.planner import get_target, missing
from mpjax.train import ConfigError, load_config, load_plugins, load_safetensors, make_setup
from tests._quick_compile import environment as quick_environment
from tests.train._own_config import PLUGIN, write_config

KINDS = ("linen", "nnx", "equinox", "haiku", "plain")
ROOT = pathlib.Path(__file__).parents[2]


def records(directory):
  lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
  timed = ("step_time_s", "_per_s")
  return [{name: value for name, value in line.items() if not name.endswith(timed)} for line in lines]


@pytest.fixture(scope="module", params=KINDS)
def finished(request, tmp_path_factory):
  """Config and directory of a finished run that no test may change."""
  folder = tmp_path_factory.mktemp(request.param)
  config = write_config(folder, request.param)
  assert main(["train", config, "--plugin", PLUGIN, f"out={folder / 'run'}"]) == 0
  return config, folder / "run"


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(finished, tmp_path):
  config, whole = finished
  out = tmp_path / "run"
  # After 34 rows that are looked at before the first step: in the tenth.
  environment = {**os.environ, **quick_environment(devices=1), "KILLED_AT_ROW": str(34 + 9 * 16 + 3)}
  command = [sys.executable, str(ROOT / "scripts" / "train.py"), config, "--plugin", PLUGIN, f"out={out}"]
  killed = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert 4 <= len(records(out)) < 12
  assert main(["train", config, "--plugin", PLUGIN, f"out={out}"]) == 0
  assert records(out) == records(whole)


@pytest.mark.slow
def test_what_is_exported_has_the_logits_of_the_run(finished, tmp_path, capsys):
  _, directory = finished
  file = tmp_path / "model.safetensors"
  assert main(["export", str(directory), "dtype=float32", f"out={file}", "--plugin", PLUGIN]) == 0
  model = load_safetensors(file)
  x = np.random.default_rng(3).standard_normal((4, 8), np.float32)
  logits = np.asarray(model.logits(x))
  assert logits.shape == (4, 4)
  assert logits.dtype == np.float32
  # As the task itself computes them in float32, but for float16's rounding.
  task = model.task
  if "nnx" in model.config.model.kind:
    module = task.init(jax.random.key(0))
    from flax import nnx

    nnx.update(module, jax.tree.map(np.asarray, model.params), jax.tree.map(np.asarray, model.model_state))
    expected = module(x)
  elif jax.tree.leaves(model.model_state):
    expected = task.logits(model.params, x, model.model_state)
  else:
    expected = task.logits(model.params, x)
  np.testing.assert_allclose(logits, np.asarray(expected), atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_a_run_is_inspected(finished, tmp_path, capsys):
  _, directory = finished
  report = tmp_path / "report.json"
  options = ["--html", str(tmp_path / "x.html"), "--json", str(report), "--no-advice"]
  assert main(["numerics", str(directory), "--plugin", PLUGIN, "batches=1", *options]) == 0
  tensors = json.loads(report.read_text())["tensors"]
  assert {"activation", "parameter", "weight gradient"} <= {tensor["kind"] for tensor in tensors}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "haiku"])
def test_a_run_that_overflows_stops_with_status_3_and_says_where(kind, tmp_path, capsys):
  out = tmp_path / "run"
  overrides = ["policy={base: fp16, loss_scaling: 1e30}", "train.max_skips=3", f"out={out}"]
  assert main(["train", write_config(tmp_path, kind), *overrides, "--plugin", PLUGIN]) == 3
  error = capsys.readouterr().err
  assert "non-finite gradients: " in error
  assert "overflowed in float16" in error
  assert main(["numerics", str(out), "--hunt", "--plugin", PLUGIN]) == 0
  assert "overflowed in float16" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_explained(kind, tmp_path, capsys):
  assert main(["explain", write_config(tmp_path, kind), "--plugin", PLUGIN]) == 0
  assert "float16" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_planned_for_a_device_that_is_not_here(kind, tmp_path, capsys):
  file = tmp_path / "plan.json"
  arguments = [write_config(tmp_path, kind), "policy=fp32,bf16", "target=h200", "mesh.data=-1"]
  assert main(["plan", *arguments, "--plugin", PLUGIN, "--analytic", "--json", str(file)]) == 0
  plans = json.loads(file.read_text())["plans"]
  assert [plan["label"] for plan in plans] == ["fp32", "bf16"]
  assert f"own_{kind}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.skipif(bool(missing(get_target("h200"))), reason="no compiler for CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_compiled_for_an_h200(kind, tmp_path):
  file = tmp_path / "plan.json"
  arguments = [write_config(tmp_path, kind), "target=h200", "--plugin", PLUGIN, "--json", str(file)]
  assert main(["plan", *arguments]) == 0
  (plan,) = json.loads(file.read_text())["plans"]
  assert plan["compiled"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("override", "words"),
  [
    ("model.widht=3", ["model.widht", "own_{kind}", "did you mean 'width'"]),
    ("model.width=wide", ["model.width='wide'", "expected an integer"]),
    ("model.width=yes", ["model.width=True", "expected a number, not True"]),
    ("data.clases=3", ["data.clases", "blobs", "did you mean 'classes'"]),
  ],
)
def test_a_bad_option_is_one_line_and_status_2(kind, override, words, tmp_path, capsys):
  arguments = [write_config(tmp_path, kind), override, "--plugin", PLUGIN, f"out={tmp_path / 'run'}"]
  assert main(["train", *arguments]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1
  assert all(word.format(kind=kind) in error for word in words), error
  assert not (tmp_path / "run").exists()


def test_the_resolved_config_has_every_option_and_no_code(tmp_path):
  load_plugins([PLUGIN])
  config = load_config(write_config(tmp_path, "haiku"), ["model.width=16"])
  tree = yaml.safe_load(config.to_yaml())
  assert tree["model"] == {"kind": "own_haiku", "width": 16, "dropout": 0.1}
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
  assert main(["train", config, "--plugin", PLUGIN, f"out={directory}"]) == 0
  command = [sys.executable, "-c", COMMANDS_WITHOUT_PLUGIN, config, str(directory)]
  out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  assert out.returncode == 0, out.stderr
  lines = out.stderr.splitlines()
  assert len(lines) == 4
  assert all("unknown model.kind 'own_plain'" in line and "--plugin FILE.py" in line for line in lines), lines


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("import nothing_of_that_name", ["ModuleNotFoundError", "nothing_of_that_name", "(own.py:1)"]),
    ("\nx = 1 / 0", ["ZeroDivisionError", "(own.py:2)"]),
    ("def (", ["SyntaxError", "own.py"]),
    (
      "import mpjax\n@mpjax.train.register_model('x')\ndef x(info, width=3): ...",
      ["by position", "after *", "own.py"],
    ),
    ("import mpjax\n@mpjax.train.register_model('x')\ndef x(info, **options): ...", ["keys without a name"]),
    ("import mpjax\n@mpjax.train.register_data('x')\ndef x(*, batch_size: int = 3): ...", ["'batch_size'"]),
    ("import mpjax\n@mpjax.train.register_model('gpt')\ndef x(info): ...", ["'gpt'", "choose another"]),
    (
      "import mpjax\n@mpjax.train.register_model('x')\ndef x(info, *, act: int = max): ...",
      ["act: int", "plain data"],
    ),
    ("import mpjax\n@mpjax.train.register_model('x')\ndef x(info, *, n: 'Nope' = 3): ...", ["'Nope'"]),
  ],
)
def test_a_plugin_that_cannot_be_used_is_one_line(text, words, tmp_path, capsys):
  (tmp_path / "own.py").write_text(text)
  assert main(["explain", "gpt_stdlib", "--plugin", str(tmp_path / "own.py")]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert all(word in error for word in words), error


@pytest.mark.parametrize("name", ["nowhere.py", "no_such_package.module", "."])
def test_a_plugin_that_is_not_there_is_one_line(name, capsys):
  assert main(["explain", "gpt_stdlib", "--plugin", name]) == 2
  assert f"--plugin {name}" in capsys.readouterr().err


def test_two_plugins_with_one_kind_are_refused(tmp_path):
  for name in ("a.py", "b.py"):
    text = "import mpjax\n@mpjax.train.register_data('twice')\ndef twice(): ..."
    (tmp_path / name).write_text(text)
  with pytest.raises(ConfigError, match=r"data.kind=twice is registered by --plugin .*a\.py"):
    load_plugins([str(tmp_path / "a.py"), str(tmp_path / "b.py")])


def task(**changes):
  return mpjax.train.Task(
    **({"init": lambda key: {"w": jax.numpy.ones(8)}, "loss_fn": loss_fn} | changes),
  )


def loss_fn(params, batch):
  return ((batch["x"] @ params["w"]) ** 2).mean()


def train(folder, make, **options):
  """Runs a model made by a function on the blobs, and returns the result."""
  load_plugins([PLUGIN])
  mpjax.train.register_model("of_a_test")(make)
  config = {
    "policy": "bf16",
    "out": str(folder / "run"),
    "model": {"kind": "of_a_test"},
    "data": {"kind": "blobs", "batch_size": 16},
    "train": {"steps": 2},
    "mesh": {"data": 1},
  }
  return mpjax.train.run(config | options)


def test_without_evaluate_the_evaluation_is_the_loss(tmp_path):
  result = train(tmp_path, lambda info: task(), optimizer={"name": "sgd", "learning_rate": 1e-9})
  setup = make_setup(load_config(result.directory / "config.yaml"))
  batches = [batch["x"] for batch in setup.data.eval()]
  expected = np.mean([(batch.sum(-1) ** 2).mean() for batch in batches])
  assert result.eval_loss == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
  "evaluate",
  [
    lambda params, batch: (loss_fn(params, batch), {"doubled": 2 * loss_fn(params, batch)}),
    lambda params, batch: {"loss": loss_fn(params, batch), "doubled": 2 * loss_fn(params, batch)},
    lambda params, batch: {"eval_loss": loss_fn(params, batch), "eval_doubled": 2 * loss_fn(params, batch)},
  ],
)
def test_an_evaluation_gives_metrics(tmp_path, evaluate):
  result = train(tmp_path, lambda info: task(evaluate=evaluate))
  assert result["eval_doubled"] == pytest.approx(2 * result.eval_loss, rel=0.02)


def test_a_parameter_tree_that_is_a_pair_of_names_is_no_state(tmp_path):
  """Only a plain tuple is (params, model_state)."""
  import collections

  Weights = collections.namedtuple("Weights", "w b")
  make = lambda info: mpjax.train.Task(
    init=lambda key: Weights(jax.numpy.ones(8), jax.numpy.zeros(())),
    loss_fn=lambda params, batch: ((batch["x"] @ params.w + params.b) ** 2).mean(),
  )
  assert train(tmp_path, make).summary["parameters"] == 9


def test_a_single_array_is_a_parameter_tree(tmp_path):
  make = lambda info: mpjax.train.Task(
    init=lambda key: jax.numpy.ones(8), loss_fn=lambda params, batch: ((batch["x"] @ params) ** 2).mean()
  )
  result = train(tmp_path, make, train={"steps": 2, "export": "safetensors"})
  assert load_safetensors(result.export).params.shape == (8,)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda info: 3, ["returned a int", "mpjax.train.Task"]),
    (lambda info: task(init=lambda key: {"w": jax.numpy.ones(8, int)}), ["'w'", "int32", "model_state"]),
    (lambda info: task(init=lambda key: ({"w": jax.numpy.ones(8)}, {})), ["model_state"]),
    (lambda info: task(sharding={"v": ("fsdp",)}), ["sharding pattern 'v'", "there are w"]),
    (lambda info: task(sharding={"w": ("fdsp",)}), ["sharding rule 'w'", "expected fsdp, tensor or null"]),
    (lambda info: task() if info.hight else None, ["'hight'", "classes, features", "x, y"]),
    (
      lambda info: task(loss_fn=lambda params, batch: params["w"][0] * info.hight),
      ["'hight'", "classes, features"],
    ),
    (lambda info: task(loss_fn=lambda params, batch: batch["x"] @ params["w"]), ["float32[16]", "scalar"]),
    (lambda info: task(evaluate=lambda params, batch: {"a": params["w"][0]}), ["eval_a", "a loss among"]),
  ],
)
def test_a_model_that_does_not_fit_is_one_line(make, words, tmp_path):
  with pytest.raises(ConfigError) as error:
    train(tmp_path, make)
  assert "\n" not in str(error.value)
  assert all(word in str(error.value) for word in words), error.value
  assert not (tmp_path / "run").exists()


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


EMULATED = {"base": "fp8", "fp8": {"emulate": True}}


@pytest.mark.parametrize("options", [{}, {"policy": EMULATED}, {"mesh": {"data": 2}}])
def test_a_start_traces_init_once_for_the_model_once_for_the_state_and_once_to_begin(tmp_path, options):
  called = []

  def init(key):
    called.append(key)
    return {"w": jax.numpy.ones(8)}

  make = lambda info: task(init=init)
  train(tmp_path, make, **options)
  assert len(called) == 3
  called.clear()
  train(tmp_path, make, **options, train={"steps": 4})  # resumes, and needs no values
  assert len(called) == 2


@pytest.mark.parametrize(
  "changes", [{"loss_fn": 3}, {"units": "tokens"}, {"sharding": "fsdp"}, {"logits": 3}]
)
def test_a_task_says_what_it_takes(changes):
  with pytest.raises(TypeError, match=f"{min(changes)}=.*expected"):
    task(**changes)


def test_a_model_says_where_its_parameters_lie(tmp_path):
  load_plugins([PLUGIN])
  overrides = ["mesh={data: 1, fsdp: 4}", "model.width=64"]
  setup = make_setup(load_config(write_config(tmp_path, "linen"), overrides))
  shardings = setup.abstract_state().params
  assert shardings["up"]["kernel"].sharding.spec == jax.P(None, "fsdp")
  assert shardings["head"]["kernel"].sharding.spec == jax.P("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "haiku"])
def test_a_mesh_trains_to_the_same_losses(kind, tmp_path):
  """Without dropout, whose keys depend on how a batch is divided, and in float32."""
  load_plugins([PLUGIN])
  curves = []
  for mesh in ("{data: 1}", "{data: 2, fsdp: 2}"):
    out = tmp_path / f"run{len(curves)}"
    overrides = ["policy=fp32", "model.dropout=0", f"mesh={mesh}", f"out={out}", "train.steps=4"]
    mpjax.train.run(write_config(tmp_path, kind), [*overrides, "train.checkpoint_every=4"])
    curves.append([record["loss"] for record in records(out)])
  # Statistics of BatchNorm are those of a device's own rows.
  np.testing.assert_allclose(*curves, rtol=0.2)
