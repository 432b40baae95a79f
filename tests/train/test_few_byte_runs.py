"""Runs with weights and optimiser state in few bytes: resumed, on another mesh, and exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mpjax.cli import main
from mpjax.optim import Quantized, is_quantized
from mpjax.train import load_config, load_safetensors, make_setup
from tests.train._runs import assert_same_bits, state_of, train
from tests.train._tiny_gpt import write_tiny_gpt

POLICIES = [
  "bf16_lean",
  pytest.param(
    "{base: fp16, optimizer_dtype: int8, loss_scaling: {growth_interval: 2}}", marks=pytest.mark.slow
  ),
  pytest.param("{base: bf16_pure, master_weights: int16}", marks=pytest.mark.slow),
]
ON_EIGHT = "mesh={data: 2, fsdp: 4}"


@pytest.fixture(scope="module", params=POLICIES)
def runs(request, tmp_path_factory):
  """Directories of a run of 4 steps, and of one that was resumed in its middle; the arguments of both."""
  folder = tmp_path_factory.mktemp("runs")
  options = ["train.eval_every=4", "train.checkpoint_every=2", "optimizer.schedule_steps=6"]
  arguments = [*write_tiny_gpt(folder, layers=1), *options, f"policy={request.param}"]
  for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
    train(arguments, folder / name, f"train.steps={steps}")
  return folder / "whole", folder / "parts", arguments


def step_of(run):
  return make_setup(load_config(run / "config.yaml", [])).step


def quantized(state):
  return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_quantized) if isinstance(x, Quantized)]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs):
  whole, parts, arguments = runs
  first = state_of(whole)
  assert_same_bits(first, state_of(parts))
  assert bool(quantized(first)) == ("int8" in arguments[-1] or "lean" in arguments[-1])
  has_corrections = step_of(whole).layers(first).masters is not None
  assert has_corrections == ("master" in arguments[-1] or "lean" in arguments[-1])


def test_codes_are_divided_as_their_parameters_are_and_stay_the_same_on_another_mesh(runs):
  state = state_of(runs[0], ON_EIGHT)
  assert_same_bits(state_of(runs[0]), state)
  assert all(isinstance(x.codes.sharding, NamedSharding) for x in quantized(state))
  assert not any(x.codes.sharding.is_fully_replicated for x in quantized(state))


def test_an_export_in_float32_is_of_the_master_weights(runs, tmp_path):
  state = state_of(runs[0])
  masters = step_of(runs[0]).masters(state)
  for dtype, expected in (("float32", masters), ("bfloat16", state.params)):
    file = tmp_path / f"{dtype}.safetensors"
    assert main(["export", str(runs[0]), f"dtype={dtype}", "step=latest", f"out={file}"]) == 0
    model = load_safetensors(file)
    for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(jnp.dtype(dtype)))
    assert np.isfinite(np.asarray(model.logits(np.zeros((1, 16), np.int32)))).all()
