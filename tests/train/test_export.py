"""Export: the dtype and bytes of the file, the logits that come back, and unfit files."""

import json
import os
import pathlib
import re
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mpjax.cli import main
from mpjax.train import ConfigError, load_config, load_safetensors, make_setup, save_safetensors

# The logits of an evaluation.
from mpjax.train.setup._experiment import apply
from tests.train._runs import raises_one_line, refused, state_of
from tests.train._tiny_gpt import write_tiny_gpt

RESNET = """
model: {kind: resnet, stages: [1], width: 8}
data: {kind: digits, batch_size: 32, eval_batches: 1}
optimizer: {name: sgd, learning_rate: 0.05}
mesh: {data: 1}
train: {steps: 6, eval_every: 3, checkpoint_every: 3}
"""
VIT = RESNET.replace("resnet, stages: [1], width: 8", "vit, dim: 32, layers: 1, heads: 2")
FP8 = "policy={base: fp8, fp8: {emulate: true, min_dim: 16}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The directory of a finished run."""
  folder = tmp_path_factory.mktemp("gpt")
  arguments = [*write_tiny_gpt(folder, layers=1), "policy=bf16", "train.steps=2", "train.export=safetensors"]
  assert main(["train", *arguments, f"out={folder / 'run'}"]) == 0
  return folder / "run"


def inputs_and_logits(config, state):
  """Inputs of an evaluation of a config and the logits that it computes of them."""
  setup = make_setup(config)
  batch = next(setup.data.eval())
  inputs = batch["images"] if "images" in batch else batch["tokens"][:, :-1]
  logits = jax.jit(apply, static_argnums=(0, 1))(setup.task.logits, setup.policy, state, inputs)
  return inputs, np.asarray(logits)


def stored_dtypes(file):
  with safetensors.safe_open(file, framework="numpy") as opened:
    return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118


def test_dtype_and_bytes_are_what_was_asked_for_and_logits_those_of_the_evaluation(run, tmp_path, capsys):
  state = state_of(run)
  inputs, expected = inputs_and_logits(load_config(run / "config.yaml"), state)
  count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  # In the policy's own dtype they are bitwise the same but for norms, whose parameters are float32 there.
  for dtype, name, size, tolerance in [
    (None, None, 2, 0.02),
    ("float32", "fp32", 4, 0.0),
    ("float16", "float16", 2, 0.05),
  ]:
    file = tmp_path / f"{dtype}.safetensors"
    if dtype is None:
      file = run / "model.safetensors"
    else:
      assert main(["export", str(run), f"dtype={name}", "step=latest", f"out={file}"]) == 0
      assert str(file) in capsys.readouterr().out
    model = load_safetensors(file)
    leaves = jax.tree.leaves(model.params)
    assert {leaf.dtype.name for leaf in leaves} == {dtype or "bfloat16"}
    assert sum(leaf.nbytes for leaf in leaves) == size * count, dtype
    assert all(name.startswith(("params/", "model_state/")) for name in stored_dtypes(file))
    np.testing.assert_allclose(np.asarray(model.logits(inputs)), expected, atol=tolerance, rtol=tolerance)


def test_statistics_come_back_in_float32_and_a_policy_with_its_reduce_dtype(tmp_path):
  path, file = tmp_path / "resnet.yaml", tmp_path / "model.safetensors"
  path.write_text(RESNET)
  config = load_config(path, ["policy={base: bf16, reduce_dtype: bfloat16}"])
  setup = make_setup(config)
  state = setup.first_state()
  save_safetensors(file, config, setup.info, state.params, state.model_state)
  model = load_safetensors(file)
  assert model.policy.reduce_dtype == jnp.bfloat16
  assert jax.tree.structure(model.params) == jax.tree.structure(state.params)
  assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(model.model_state))
  inputs, expected = inputs_and_logits(config, state)
  np.testing.assert_allclose(np.asarray(model.logits(inputs)), expected, atol=0.02, rtol=0.02)


def test_weights_of_fp8_products_are_stored_in_fp8_with_their_scale(tmp_path):
  (gpt,), vit = write_tiny_gpt(tmp_path, layers=1), tmp_path / "vit.yaml"
  vit.write_text(VIT)
  for path in (gpt, vit):
    config = load_config(path, [FP8])
    setup = make_setup(config)
    state = setup.first_state()
    sizes, models = {}, {}
    for dtype in ("float8_e4m3fn", "bfloat16"):
      file = tmp_path / f"{dtype}.safetensors"
      save_safetensors(file, config, setup.info, state.params, state.model_state, dtype)
      models[dtype], sizes[dtype] = load_safetensors(file), file.stat().st_size
    dtypes = stored_dtypes(tmp_path / "float8_e4m3fn.safetensors")
    eight = {name for name, dtype in dtypes.items() if dtype == "F8_E4M3"}
    assert {name.split("/")[-2] for name in eight} >= {"up", "down"}
    assert all(dtypes[f"{name}_scale"] == "F32" for name in eight)
    assert sizes["float8_e4m3fn"] < sizes["bfloat16"]
    for near, exact in zip(*(jax.tree.leaves(model.params) for model in models.values()), strict=True):
      near, exact = (np.asarray(x, np.float32) for x in (near, exact))
      assert np.linalg.norm(near - exact) <= 0.05 * np.linalg.norm(exact)


def test_a_finished_run_needs_its_directory_and_not_its_data(run, tmp_path, capsys):
  copy = shutil.copytree(run, tmp_path / "copy")
  facts = copy / "facts.json"
  for file in (facts, copy / "config.yaml"):
    file.write_text(file.read_text().replace(str(run.parent), "/gone"))
  assert main(["export", str(copy), f"out={tmp_path / 'x'}"]) == 0
  assert main(["explain", str(copy), "policy=fp16"]) == 0
  assert main(["plan", str(copy), "target=h200", "--analytic"]) == 0
  capsys.readouterr()
  for what in ("{", '{"data": 3}'):  # none, or those of other data
    facts.write_text(what)
    refused(["export", str(copy)], ["/gone/corpus", "no such file"], capsys)


def test_unfit_requests_are_one_line_and_status_2(run, tmp_path, capsys):
  for options, words in [
    (["dtype=float8"], ["'float8'", "bf16", "fp8"]),
    (["step=7"], ["'7'", "best, latest"]),
    (["steps=7"], ["'steps'", "step"]),
    (["dtype=float8_e4m3fn"], ["no matrix product of this model is FP8"]),
  ]:
    refused(["export", str(run), *options], words, capsys)
  refused(["export", str(tmp_path)], ["not a run directory"], capsys)


def test_a_target_that_is_no_regular_file_is_refused(run, tmp_path, capsys):
  (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
  os.mkfifo(tmp_path / "pipe")
  before = sorted(tmp_path.iterdir())
  targets = [
    "/dev/null",
    tmp_path / "link",
    tmp_path / "pipe",
    tmp_path,
    tmp_path / "missing" / "x",
    "/proc/x",
  ]
  for target in targets:
    refused(["export", str(run), f"out={target}"], [f"cannot write {target}: "], capsys)
    assert sorted(tmp_path.iterdir()) == before, target


def test_the_file_has_the_mode_of_a_new_file_and_the_command_says_how_to_read_it(run, tmp_path, capsys):
  file = tmp_path / "x.safetensors"
  for umask in (0o022, 0o077, 0o002):
    before = os.umask(umask)
    try:
      assert main(["export", str(run), f"out={file}", "dtype=float16"]) == 0
    finally:
      os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    file.unlink() if umask != 0o002 else None
  first, second = capsys.readouterr().out.splitlines()[-2:]
  assert first == f"exported {file}: {file.stat().st_size / 1e3:.2f} kB"
  assert second == f'read it by mpjax.train.load_safetensors("{file}"), whose .logits(...) runs the model'
  assert repr(load_safetensors(file)) == ("ExportedModel(gpt, 20,576 parameters in float16, policy bf16)")


def test_no_absolute_path_is_in_the_file(run, tmp_path):
  with safetensors.safe_open(run / "model.safetensors", framework="numpy") as opened:
    metadata = json.dumps(opened.metadata())
  assert "corpus" in metadata
  for folder in (run.parent, run, pathlib.Path.cwd(), pathlib.Path.home(), tmp_path):
    assert str(folder) not in metadata
  assert not re.search(r"[\s\"'\[]/\w", metadata)
  assert load_safetensors(run / "model.safetensors").config.data.options["path"] == "corpus"


def test_foreign_damaged_and_incomplete_files_are_refused(run, tmp_path):
  safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "foreign")
  (tmp_path / "damaged").write_bytes(b"\1" * 100)
  assert main(["export", str(run), "dtype=float32", f"out={tmp_path / 'whole'}"]) == 0
  with safetensors.safe_open(tmp_path / "whole", framework="numpy") as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = file.metadata()
  assert json.loads(metadata["data"])["facts"]["vocab_size"] == 256
  missing = min(tensors)
  del tensors[missing]
  safetensors.numpy.save_file(tensors, tmp_path / "less", metadata)
  for name, words in [
    ("foreign", "not an export of mpjax"),
    ("damaged", "cannot read"),
    ("missing", "cannot read"),
    ("less", f"tensor {missing!r}"),
  ]:
    raises_one_line(ConfigError, [words], load_safetensors, tmp_path / name)
