"""The optimiser's state in the host's memory between steps: `offload="optimizer"`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax import _compat

_SHAPE = jax.ShapeDtypeStruct
_BATCH = {"x": np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)}
needs_host_memory = pytest.mark.skipif(
  not _compat.has_newer_xla(), reason="a CPU copies to it from JAX 0.12 on"
)


def loss(params, batch):
  return (jnp.tanh(batch["x"] @ params["w"]) ** 2).mean()


def first_params():
  return {"w": jnp.full((64, 64), 0.1), "b": jnp.zeros(64)}


def step_of(offload, policy="fp16", mesh=None):
  mesh = mesh or jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  return mpjax.make_train_step(loss, optax.adam(1e-2), policy, mesh=mesh, offload=offload)


def kinds(tree):
  return {(leaf.shape, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(tree)}


@needs_host_memory
@pytest.mark.parametrize("policy", ["fp16", "bf16_lean"])
def test_large_state_stays_on_the_host_and_numbers_are_the_same(policy):
  step, plain = step_of("optimizer", policy), step_of(None, policy)
  state, expected = step.init(first_params()), plain.init(first_params())
  for _ in range(2):
    state, _ = step(state, _BATCH)
    expected, _ = plain(expected, _BATCH)
  assert ((64, 64), "pinned_host") in kinds(state.opt_state)
  assert ((64,), "pinned_host") not in kinds(state.opt_state)
  assert {kind for _, kind in kinds(state.arrays)} == {"device"}
  assert step.jitted._cache_size() == 1
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(a, b)
  assert {kind for _, kind in kinds(step.user_state(state))} == {"device"}
  assert mpjax.find_nonfinite(step, state, _BATCH)


@needs_host_memory
def test_another_policy_is_looked_at_with_state_on_the_host():
  reports = []
  for step in (step_of("optimizer"), step_of(None)):
    state = step.init(first_params())
    assert mpjax.find_nonfinite(step, state, _BATCH, policy="bf16").finite
    reports.append(mpjax.inspect_numerics(step, state, _BATCH, policy="bf16", advise=False))
  updates = [[(t.path, t.norm, t.moved) for t in report.of("update")] for report in reports]
  assert updates[0] == updates[1] != []


def test_plan_counts_copies_and_leaves_the_state_out():
  params = jax.eval_shape(first_params)
  plans = []
  for offload in (None, "optimizer"):
    step = step_of(offload, "fp32", jax.sharding.AbstractMesh((1,), ("data",)))
    state = jax.eval_shape(lambda step=step: step.init(jax.tree.map(lambda x: jnp.zeros(x.shape), params)))
    plans.append(mpjax.plan(step, state, {"x": _SHAPE((8, 64), jnp.float32)}, target="h100", compile=False))
  moments = 2 * 4 * 64 * 64
  before, after = plans
  assert before.host is None
  assert (after.host.held, after.host.to_device, after.host.to_host) == (moments,) * 3
  parts = [plan.memory.parts["optimizer state"] for plan in plans]
  assert parts[0] - parts[1] == moments
  assert before.memory.peak - after.memory.peak == moments
  assert "on the host" in str(after)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({"offload": "optimizer"}, ["pass mesh=", "one device is enough"]),
    ({"offload": "optimiser", "mesh": jax.sharding.AbstractMesh((1,), ("data",))}, ["'optimizer', or None"]),
  ],
)
def test_refuses_in_one_line(arguments, words):
  with pytest.raises(ValueError, match=".*".join(words)):
    mpjax.make_train_step(loss, optax.adam(1e-2), "fp32", **arguments)
