"""Export: the dtype and bytes of the file, the logits that come back, and unfit files."""

import json
import os
import pathlib
import re
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mpjax.cli import main
from mpjax.train import ConfigError, load_config, load_safetensors, make_setup, save_safetensors
from mpjax.train._tasks import apply
from mpjax.train.checkpoints import Checkpoints
from tests.train._tiny_gpt import write_tiny_gpt

RESNET = """
model: {kind: resnet, stages: [1, 1], width: 8}
data: {kind: digits, batch_size: 32, eval_batches: 1}
optimizer: {name: sgd, learning_rate: 0.05}
mesh: {data: 1}
train: {steps: 6, eval_every: 3, checkpoint_every: 3}
"""


@pytest.fixture(scope="module", params=["gpt", "resnet"])
def run(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  if request.param == "resnet":
    path = folder / "resnet.yaml"
    path.write_text(RESNET)
  else:
    (path,) = write_tiny_gpt(folder)
  arguments = [
    str(path),
    "policy=bf16",
    "train.steps=6",
    "train.export=safetensors",
    f"out={folder / 'run'}",
  ]
  assert main(["train", *arguments]) == 0
  setup = make_setup(load_config(arguments[0], arguments[1:]))
  checkpoints = Checkpoints(folder / "run" / "checkpoints")
  state = checkpoints.restore(6, setup.abstract_state()).state
  checkpoints.close()
  batch = next(setup.data.eval())
  inputs = batch["images"] if "images" in batch else batch["tokens"][:, :-1]
  expected = jax.jit(apply, static_argnums=(0, 1))(setup.task.logits, setup.policy, state, inputs)
  return folder / "run", inputs, np.asarray(expected), state


@pytest.mark.slow
def test_the_exported_model_gives_the_logits_of_the_evaluation(run):
  directory, inputs, expected, _ = run
  model = load_safetensors(directory / "model.safetensors")
  # The evaluation's norms read float32 parameters, and those in the file are rounded.
  np.testing.assert_allclose(np.asarray(model.logits(inputs)), expected, atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dtype", "size", "tolerance"), [("float32", 4, 0.0), ("bfloat16", 2, 0.02), ("float16", 2, 0.05)]
)
def test_dtype_and_bytes_are_what_was_asked_for(run, tmp_path, dtype, size, tolerance, capsys):
  directory, inputs, expected, state = run
  file = tmp_path / f"{dtype}.safetensors"
  assert main(["export", str(directory), f"dtype={dtype}", "step=latest", f"out={file}"]) == 0
  assert str(file) in capsys.readouterr().out
  tensors = safetensors.numpy.load_file(file) if dtype != "bfloat16" else None
  model = load_safetensors(file)
  leaves = jax.tree.leaves(model.params)
  assert {leaf.dtype.name for leaf in leaves} == {dtype}
  assert sum(leaf.nbytes for leaf in leaves) == size * sum(
    leaf.size for leaf in jax.tree.leaves(state.params)
  )
  assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(model.model_state))
  if tensors is not None:
    assert all(name.startswith(("params/", "model_state/")) for name in tensors)
  np.testing.assert_allclose(np.asarray(model.logits(inputs)), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (["dtype=float8"], ["float8", "bfloat16"]),
    (["step=7"], ["'7'", "best, latest"]),
    (["steps=7"], ["'steps'", "step"]),
  ],
)
def test_unfit_requests_are_one_line_and_status_2(finished_run, options, words, capsys):
  assert main(["export", str(finished_run), *options]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert all(word in error for word in words), error


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("finished")
  assert main(["train", *write_tiny_gpt(folder), "train.steps=2", f"out={folder / 'short'}"]) == 0
  return folder / "short"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_file_has_the_mode_of_a_new_file(finished_run, tmp_path, umask, capsys):
  before = os.umask(umask)
  try:
    assert main(["export", str(finished_run), f"out={tmp_path / 'x'}"]) == 0
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


def test_the_command_says_size_and_dtype_and_how_to_read_the_file(finished_run, tmp_path, capsys):
  file = tmp_path / "x.safetensors"
  assert main(["export", str(finished_run), f"out={file}", "dtype=bfloat16"]) == 0
  first, second = capsys.readouterr().out.splitlines()
  assert first == f"exported {file}: {file.stat().st_size / 1e3:.2f} kB, parameters: 32,928 in bfloat16"
  assert second == f'read it by mpjax.train.load_safetensors("{file}"), whose .logits(...) runs the model'


def test_a_model_is_shown_on_one_line(finished_run, tmp_path):
  assert main(["export", str(finished_run), f"out={tmp_path / 'x'}", "dtype=float16"]) == 0
  shown = repr(load_safetensors(tmp_path / "x"))
  assert shown == (
    "ExportedModel(gpt, 32,928 parameters in float16, policy bf16; .logits(tokens), .params, .model_state)"
  )


def test_no_absolute_path_is_in_the_file(finished_run, tmp_path):
  file = tmp_path / "x"
  assert main(["export", str(finished_run), f"out={file}"]) == 0
  with safetensors.safe_open(file, framework="numpy") as opened:
    metadata = json.dumps(opened.metadata())
  assert "corpus" in metadata
  for folder in (finished_run.parent, finished_run, pathlib.Path.cwd(), pathlib.Path.home(), tmp_path):
    assert str(folder) not in metadata
  assert not re.search(r"[\s\"'\[]/\w", metadata)
  assert load_safetensors(file).config.data.options["path"] == "corpus"


def make_device(folder):
  return pathlib.Path("/dev/null")


def make_link(folder):
  (folder / "link").symlink_to(folder / "elsewhere")
  return folder / "link"


def make_pipe(folder):
  os.mkfifo(folder / "pipe")
  return folder / "pipe"


@pytest.mark.parametrize(
  ("make", "word"),
  [
    (make_device, "it is a device"),
    (make_link, "it is a link"),
    (make_pipe, "it is a pipe"),
    (lambda folder: folder, "it is a folder"),
    (lambda folder: folder / "missing" / "x", "there is no folder"),
    (lambda folder: pathlib.Path("/proc/x"), "cannot write /proc/x"),
  ],
)
def test_a_target_that_is_no_regular_file_is_refused(finished_run, tmp_path, capsys, make, word):
  target = make(tmp_path)
  before = sorted(tmp_path.iterdir())
  assert main(["export", str(finished_run), f"out={target}"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1, error
  assert word in error
  assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_is_no_run_is_named(tmp_path, capsys):
  assert main(["export", str(tmp_path)]) == 2
  assert "not a run directory" in capsys.readouterr().err


def test_foreign_and_damaged_files_are_refused(tmp_path):
  foreign = tmp_path / "foreign.safetensors"
  safetensors.numpy.save_file({"w": np.ones(2)}, foreign)
  with pytest.raises(ConfigError, match="not an export of mpjax"):
    load_safetensors(foreign)
  (tmp_path / "damaged.safetensors").write_bytes(b"\1" * 100)
  with pytest.raises(ConfigError, match="cannot read"):
    load_safetensors(tmp_path / "damaged.safetensors")
  with pytest.raises(ConfigError, match="cannot read"):
    load_safetensors(tmp_path / "missing.safetensors")


def test_a_missing_tensor_is_named(finished_run, tmp_path):
  main(["export", str(finished_run), "dtype=float32"])
  with safetensors.safe_open(finished_run / "model.safetensors", framework="numpy") as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = file.metadata()
  assert json.loads(metadata["data"])["facts"]["vocab_size"] == 256
  missing = min(tensors)
  del tensors[missing]
  safetensors.numpy.save_file(tensors, tmp_path / "less.safetensors", metadata)
  with pytest.raises(ConfigError, match=re.escape(f"tensor {missing!r}")):
    load_safetensors(tmp_path / "less.safetensors")


VIT = """
model: {kind: vit, dim: 32, layers: 1, heads: 2}
data: {kind: digits, batch_size: 32, eval_batches: 1}
optimizer: {name: sgd, learning_rate: 0.05}
mesh: {data: 1}
train: {steps: 2, eval_every: 2, checkpoint_every: 2}
"""
FP8 = "policy={base: fp8, fp8: {emulate: true, min_dim: 16}}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "vit"])
def test_weights_of_fp8_products_are_stored_in_fp8_with_their_scale(kind, tiny_gpt, tmp_path):
  config, size = tmp_path / "vit.yaml", []
  config.write_text(VIT)
  if kind == "gpt":
    config, size = tiny_gpt[0], ["model.dim=32", "train.steps=2", "train.checkpoint_every=2"]
  directory = tmp_path / "run"
  assert main(["train", str(config), FP8, *size, f"out={directory}"]) == 0
  models, sizes = {}, {}
  for dtype in ("float8_e4m3fn", "bfloat16"):
    file = tmp_path / f"{dtype}.safetensors"
    assert main(["export", str(directory), f"dtype={dtype}", f"out={file}"]) == 0
    models[dtype], sizes[dtype] = load_safetensors(file), file.stat().st_size
  with safetensors.safe_open(tmp_path / "float8_e4m3fn.safetensors", framework="numpy") as file:
    dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
  eight = {name for name, dtype in dtypes.items() if dtype == "F8_E4M3"}
  assert {name.split("/")[-2] for name in eight} >= {"up", "down"}
  assert all(dtypes[f"{name}_scale"] == "F32" for name in eight)
  assert sizes["float8_e4m3fn"] < sizes["bfloat16"]
  setup = make_setup(load_config(str(config), [FP8, *size, f"out={directory}"]))
  batch = next(setup.data.eval())
  inputs = batch["images"] if kind == "vit" else batch["tokens"][:, :-1]
  near, expected = (np.asarray(models[dtype].logits(inputs)) for dtype in ("float8_e4m3fn", "bfloat16"))
  assert np.linalg.norm(near - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("run", ["gpt"], indirect=True)
def test_a_model_without_fp8_products_has_no_export_in_fp8(run, capsys):
  directory = run[0]
  assert main(["export", str(directory), "dtype=float8_e4m3fn"]) == 2
  assert "no matrix product of this model is FP8" in capsys.readouterr().err


def test_a_run_that_reduces_gradients_in_half_precision_can_be_read_back(tmp_path):
  path, file = tmp_path / "resnet.yaml", tmp_path / "model.safetensors"
  path.write_text(RESNET)
  config = load_config(path, ["policy={base: bf16, reduce_dtype: bfloat16}"])
  setup = make_setup(config)
  state = setup.first_state()
  save_safetensors(file, config, setup.info, state.params, state.model_state)
  model = load_safetensors(file)
  assert model.policy.reduce_dtype == jnp.bfloat16
  assert jax.tree.structure(model.params) == jax.tree.structure(state.params)
