"""Fifty steps on a mesh, with both ways to gather parameters: the losses of one device."""

import functools

import numpy as np
import optax
import pytest

from tests.step import _small_networks as small

STEPS = 50
_random = np.random.default_rng(0)
BATCHES = [
  {"x": _random.normal(size=(32, 64)).astype(np.float32), "y": _random.integers(0, 8, 32)}
  for _ in range(STEPS)
]
TX = optax.sgd(0.02, momentum=0.9)
OVERFLOWS = {"base": "fp16", "loss_scaling": {"init_scale": 2.0**20, "growth_interval": 8}}
FP8 = {"base": "fp8", "fp8": {"emulate": True, "min_dim": 16}}

# For each case how far a loss may be from that of one device.
CASES = {
  "fp32": (small.plain, small.of_weights, "fp32", {}, 1e-6),
  "fp32, micro-batches": (small.plain, small.of_weights, "fp32", {"accumulate": 2}, 1e-6),
  "fp32, scanned": (small.scanned, small.of_layers, "fp32", {}, 1e-6),
  "fp32, not scanned": (small.unrolled, small.of_layers, "fp32", {}, 1e-6),
  "keys by row": (small.with_dropout, small.of_dropout, "fp32", {"accumulate": 2}, 1e-6),
  "statistics of the batch": (small.with_statistics, small.of_statistics, "fp32", {}, 1e-6),
  "clipped by the norm of all": (
    small.plain,
    small.of_weights,
    "fp32",
    {"tx": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))},
    1e-5,
  ),
  "bf16": (small.plain, small.of_weights, "bf16", {}, 1e-2),
  "bf16, scanned": (small.scanned, small.of_layers, "bf16", {}, 1e-2),
  "bf16 by casts": (small.plain, small.of_weights, {"base": "bf16", "autocast": False}, {}, 1e-2),
  "bf16 without master weights": (small.plain, small.of_weights, "bf16_pure", {}, 1e-2),
  "fp16": (
    small.plain,
    small.of_weights,
    {"base": "fp16", "loss_scaling": {"init_scale": 1024}},
    {"accumulate": 2},
    1e-2,
  ),
  # A device's own rows overflow where the mean of all did not: other steps are skipped.
  "fp16, overflows": (small.plain, small.of_weights, OVERFLOWS, {}, None),
  "fp16, overflows, scanned": (small.scanned, small.of_layers, OVERFLOWS, {}, None),
  "fp8, scanned": (small.scanned, small.of_layers, FP8, {}, 3e-2),
  "fp8, not scanned": (small.unrolled, small.of_layers, FP8, {}, 3e-2),
}
ON_THREE_AXES = ("fp32, micro-batches", "fp16", "keys by row", "statistics of the batch")


@functools.cache
def run(case, gather=None, **sizes):
  """The state after fifty steps, and their metrics; without `gather` on one device."""
  loss, init, policy, options, _ = CASES[case]
  if gather is not None:
    options = {**options, "mesh": small.mesh(**sizes), "gather": gather}
  _, state, curve = small.train(loss, policy, init, **{"tx": TX, **options}, batches=BATCHES)
  return state, {name: np.array([m[name] for m in curve]) for name in curve[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "sizes"),
  [
    *((case, {"fsdp": 8}) for case in CASES),
    *((case, {"data": 2, "fsdp": 2, "tensor": 2}) for case in ON_THREE_AXES),
  ],
)
def test_fifty_steps_on_a_mesh_are_those_of_one_device(case, sizes):
  (one, expected), rtol = run(case), CASES[case][4]
  assert one.step == STEPS
  (by_step, known), (by_block, found) = (run(case, gather, **sizes) for gather in ("step", "block"))
  assert expected.keys() == known.keys() == found.keys()
  np.testing.assert_allclose(found["loss"], known["loss"], rtol=min(1e-2, rtol or 1e-2))
  if rtol is None:
    assert 0 < expected["skipped_steps"][-1] < STEPS
    np.testing.assert_array_equal(found["skipped_steps"], known["skipped_steps"])
    return
  for curve, state in ((known, by_step), (found, by_block)):
    np.testing.assert_allclose(curve["loss"], expected["loss"], rtol=rtol)
    for name in ("params", "model_state"):
      a, b = small.np_tree(getattr(state, name)), small.np_tree(getattr(one, name))
      small.assert_close(a, b, 1e-4 if rtol < 1e-4 else 3e-2)
