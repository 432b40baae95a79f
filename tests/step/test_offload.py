"""The optimiser's state in the host's memory between steps: `offload="optimizer"`."""

import jax
import optax
import pytest

import mpjax
from mpjax import _compat
from tests.step._problems import WIDE_BATCH, WIDE_PARAMS, assert_same, mesh, train, wide_loss

ONE_DEVICE = mesh(data=1)


def step_of(offload, policy="fp16", mesh=ONE_DEVICE):
  return mpjax.make_train_step(wide_loss, optax.adam(1e-2), policy, mesh=mesh, offload=offload)


def kinds(tree):
  return {(leaf.shape, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(tree)}


@pytest.mark.skipif(not _compat.has_newer_xla(), reason="a CPU copies to it from JAX 0.12 on")
@pytest.mark.parametrize("policy", ["fp16", "bf16_lean"])
def test_large_state_stays_on_the_host_and_numbers_are_the_same(policy):
  step, plain = step_of("optimizer", policy), step_of(None, policy)
  state, _ = train(step, step.init(WIDE_PARAMS), 2, WIDE_BATCH)
  expected, _ = train(plain, plain.init(WIDE_PARAMS), 2, WIDE_BATCH)
  assert ((128, 256), "pinned_host") in kinds(state.opt_state)
  assert ((256,), "pinned_host") not in kinds(state.opt_state)
  assert {kind for _, kind in kinds(state.arrays)} == {"device"}
  assert step.jitted._cache_size() == 1
  assert_same(state, expected)
  assert {kind for _, kind in kinds(step.user_state(state))} == {"device"}


def test_plan_counts_copies_and_leaves_the_state_out():
  plans = []
  for offload in (None, "optimizer"):
    step = step_of(offload, "fp32", jax.sharding.AbstractMesh((1,), ("data",)))
    params, batch = mpjax.dtypes.as_shapes((WIDE_PARAMS, WIDE_BATCH))
    state = jax.eval_shape(step.init, params)
    plans.append(mpjax.plan(step, state, batch, target="h100", compile=False))
  moments = 2 * 4 * (128 * 256 + 256 * 64)
  before, after = plans
  assert before.host is None
  assert (after.host.held, after.host.to_device, after.host.to_host) == (moments,) * 3
  parts = [plan.memory.parts["optimizer state"] for plan in plans]
  assert parts[0] - parts[1] == before.memory.peak - after.memory.peak == moments
  assert "on the host" in str(after)
