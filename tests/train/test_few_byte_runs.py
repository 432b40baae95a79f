"""Runs with weights and optimiser state in few bytes: resumed, on another mesh, and exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mpjax.cli import main
from mpjax.optim import Quantized, find_master_weights, is_quantized
from mpjax.step._optimizer import masters_of
from mpjax.train import load_config, load_safetensors, make_setup
from mpjax.train.checkpoints import Checkpoints
from tests.train._tiny_gpt import write_tiny_gpt

POLICIES = [
  "bf16_lean",
  pytest.param("{base: bf16, optimizer_dtype: int8}", marks=pytest.mark.slow),
  pytest.param(
    "{base: fp16, optimizer_dtype: int8, loss_scaling: {growth_interval: 2}}", marks=pytest.mark.slow
  ),
  pytest.param("{base: bf16_pure, master_weights: int16}", marks=pytest.mark.slow),
]
ON_EIGHT = "mesh={data: 2, fsdp: 4}"


@pytest.fixture(scope="module", params=POLICIES)
def runs(request, tmp_path_factory):
  """Directories of a run of 6 steps, and of one that was resumed in its middle; the arguments of both."""
  folder = tmp_path_factory.mktemp("runs")
  options = ["train.eval_every=6", "train.checkpoint_every=3", "optimizer.schedule_steps=6"]
  arguments = [*write_tiny_gpt(folder, layers=1), *options, f"policy={request.param}"]
  whole, parts = folder / "whole", folder / "parts"
  for out, steps in ((whole, 6), (parts, 3), (parts, 6)):
    assert main(["train", *arguments, f"train.steps={steps}", f"out={out}"]) == 0
  return whole, parts, arguments


def state_of(directory, *overrides):
  setup = make_setup(load_config(directory / "config.yaml", list(overrides)))
  checkpoints = Checkpoints(directory / "checkpoints", read_only=True)
  state = checkpoints.restore(checkpoints.latest(), setup.abstract_state()).state
  checkpoints.close()
  return state


def assert_same_bits(one, other):
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path((one.params, one.opt_state)),
    jax.tree.leaves((other.params, other.opt_state)),
    strict=True,
  ):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def quantized(state):
  return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_quantized) if isinstance(x, Quantized)]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs):
  whole, parts, arguments = runs
  first, second = state_of(whole), state_of(parts)
  assert_same_bits(first, second)
  assert bool(quantized(first)) == ("int8" in arguments[-1] or "lean" in arguments[-1])
  assert bool(find_master_weights(first.opt_state)) == ("master" in arguments[-1] or "lean" in arguments[-1])


def test_codes_are_divided_as_their_parameters_are_and_stay_the_same_on_another_mesh(runs):
  whole, _, _ = runs
  state = state_of(whole, ON_EIGHT)
  assert_same_bits(state_of(whole), state)
  assert all(isinstance(x.codes.sharding, NamedSharding) for x in quantized(state))
  assert not any(x.codes.sharding.is_fully_replicated for x in quantized(state))


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_and_back(runs):
  _, parts, arguments = runs
  for steps, mesh in ((8, ON_EIGHT), (9, "mesh={data: 1}")):
    assert main(["train", *arguments, mesh, f"train.steps={steps}", f"out={parts}"]) == 0
    assert int(state_of(parts).step) == steps


def test_an_export_in_float32_is_of_the_master_weights(runs, tmp_path):
  whole, _, _ = runs
  state = state_of(whole)
  masters = masters_of(state.params, state.opt_state)
  for dtype, expected in (("float32", masters), ("bfloat16", state.params)):
    file = tmp_path / f"{dtype}.safetensors"
    assert main(["export", str(whole), f"dtype={dtype}", "step=latest", f"out={file}"]) == 0
    model = load_safetensors(file)
    jax.tree.map(
      np.testing.assert_array_equal,
      model.params,
      jax.tree.map(lambda p: p.astype(jnp.dtype(dtype)), expected),
    )
    assert np.isfinite(np.asarray(model.logits(np.zeros((1, 16), np.int32)))).all()
