"""The Llama of examples/: what it computes and costs."""

import json
import pathlib
import re
import runpy
import sys
import types

import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.cli import main

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


@pytest.mark.slow
def test_it_computes_what_the_papers_say_whether_queries_are_divided_or_not(run):
  files = [run / "hf" / name for name in ("config.json", "model.safetensors")]
  assert len({file.stat().st_mode for file in files}) == 1  # that of the umask
  config = json.loads(files[0].read_text())
  expected = reference(config, safetensors.numpy.load_file(files[1]), TOKENS)
  model = mpjax.train.load_safetensors(run / "model.safetensors")
  for logits in (model.logits(TOKENS), task(queries=8).logits(model.params, TOKENS)):
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def reference(config, weights, tokens):
  """Logits by the formulas of the papers in float64, a head and a position at a time, of HF's weights."""
  w = {name: array.astype(np.float64) for name, array in weights.items()}
  size = config["hidden_size"] // config["num_attention_heads"]
  share = config["num_attention_heads"] // config["num_key_value_heads"]

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

  def turned(x):
    pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
    speeds = config["rope_theta"] ** (-2 * np.arange(size // 2) / size)
    pairs = pairs * np.exp(1j * np.arange(len(x))[:, None] * speeds)
    return np.concatenate([pairs.real, pairs.imag], -1)

  def one(tokens):
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
      at = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]
      h = norm(x, at("input_layernorm"))
      q, k, v = (h @ at(f"self_attn.{name}_proj").T for name in "qkv")
      heads = []
      for head in range(config["num_attention_heads"]):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // share * size, (head // share + 1) * size)
        scores = turned(q[:, mine]) @ turned(k[:, shared]).T / np.sqrt(size)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
      x = x + np.concatenate(heads, -1) @ at("self_attn.o_proj").T
      h = norm(x, at("post_attention_layernorm"))
      gate = h @ at("mlp.gate_proj").T
      x = x + (gate / (1 + np.exp(-gate)) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

  return np.stack([one(row) for row in tokens])


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
