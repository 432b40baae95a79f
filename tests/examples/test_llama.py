"""The Llama of examples/: what it computes and costs."""

import json
import pathlib
import re
import runpy
import sys
import types

import flax.traverse_util
import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.cli import main
from tests.models._transformers import made

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "llama"
PLUGIN = ["--plugin", str(FOLDER / "llama.py")]
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 32)).astype(np.int32)
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
SMALL = [f"model.{name}={size}" for name, size in SIZES.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The directory of a short run, with its export in float32 and that in the names of `transformers`."""
  directory = tmp_path_factory.mktemp("llama") / "run"
  short = ["train.steps=6", "data.batch_size=8", "data.seq_len=32", "data.eval_batches=1"]
  arguments = [str(FOLDER / "stdlib.yaml"), *PLUGIN, "policy=fp32", f"out={directory}", *SMALL, *short]
  assert main(["train", *arguments]) == 0
  assert main(["export", str(directory), *PLUGIN, "dtype=float32"]) == 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["", str(directory / "model.safetensors"), str(directory / "hf")])
    patch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / "to_transformers.py"), run_name="__main__")
  return directory


def task(**options):
  """The plug-in's model for bytes."""
  info = types.SimpleNamespace(vocab_size=256, seq_len=32, recompute="none")
  return runpy.run_path(str(FOLDER / "llama.py"))["llama"](info, **SIZES, **options)


def flax_tree(weights):
  """Weights of PyTorch's names and order as the Flax models of transformers have them."""
  tree = {}
  for name, array in weights.items():
    *path, leaf = name.split(".")
    if array.ndim == 2:
      leaf, array = ("embedding", array) if path[-1] == "embed_tokens" else ("kernel", array.T)
    tree[(*path, leaf)] = array
  return flax.traverse_util.unflatten_dict(tree)


@pytest.mark.slow
def test_transformers_has_the_same_logits_and_divided_queries_do(run):
  files = [run / "hf" / name for name in ("config.json", "model.safetensors")]
  assert len({file.stat().st_mode for file in files}) == 1  # that of the umask
  model = mpjax.train.load_safetensors(run / "model.safetensors")
  logits = model.logits(TOKENS)
  np.testing.assert_allclose(task(queries=8).logits(model.params, TOKENS), logits, atol=2e-5)
  theirs = made("Llama", "ForCausalLM", **json.loads(files[0].read_text()))
  params = flax_tree(safetensors.numpy.load_file(files[1]))
  np.testing.assert_allclose(theirs(TOKENS, params=params).logits, logits, atol=2e-5)


@pytest.mark.slow
def test_the_8b_is_planned(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "116")
  for target in ("h100:8 mesh.fsdp=8", "v5e:16x16 mesh.fsdp=32 mesh.tensor=8 data.batch_size=32"):
    arguments = [str(FOLDER / "llama3_8b.yaml"), *PLUGIN, "--analytic", *f"target={target}".split()]
    assert main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    assert "llama of 8,030,261,248 parameters" in out
    assert re.search(r"bfloat16 100.0% of [\d.]+ [TP]FLOP; all at the full rate", out)


def test_sizes_that_do_not_fit_are_one_line(capsys):
  for wrong in ("model.kv_heads=3", "model.heads=3", "model.dim=10"):
    assert main(["explain", str(FOLDER / "stdlib.yaml"), *PLUGIN, wrong]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "kv_heads" in line, wrong
