"""Loss scaling under jit, donation, scan, vmap, shard_map, pmap and sharded parameters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax

F32 = np.float32
PARAMS = {"w": np.asarray([[0.5, -1.25], [2.0, 0.125]], F32), "b": np.asarray([0.1, -0.2], F32)}
GRADS = {"w": np.asarray([[1.0, 2.0], [3.0, 4.0]], F32), "b": np.asarray([5.0, 6.0], F32)}
ROWS, WHOLE = PartitionSpec("d"), PartitionSpec()
close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


def mesh():
  return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def test_members_of_an_ensemble_have_their_own_scale_unless_they_agree():
  grads = np.asarray([[1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]], F32)
  for axis_name, scales, moved, count in (
    (None, [16, 8, 16], [True, False, True], [1, 0, 1]),
    ("member", [8, 8, 8], [False] * 3, [0, 0, 0]),
  ):
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=16.0, axis_name=axis_name)
    step = lambda grads, tx=tx: tx.update(grads, tx.init(grads), grads)
    updates, state = jax.jit(jax.vmap(step, axis_name="member"))(grads)
    np.testing.assert_array_equal(state.scale, scales)
    np.testing.assert_array_equal((np.asarray(updates) != 0).all(1), moved)
    np.testing.assert_array_equal(state.inner_state[0].count, count)


@pytest.mark.parametrize("how", ["shard_map", "shard_map, check_vma=False", "pmap"])
def test_every_shard_takes_the_same_decision(how):
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), axis_name="d")

  def step(grads):
    tree = {"empty": jnp.zeros((0,)), "g": grads}
    updates, state = tx.update(tree, tx.init(tree))
    return updates["g"], jnp.stack([state.scale, state.grads_finite.astype(jnp.float32)])[None]

  if how == "pmap":
    run = jax.pmap(step, axis_name="d")
  else:
    vma = how == "shard_map"
    run = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=ROWS, out_specs=ROWS, check_vma=vma))
  for bad in (None, 0, 5):
    grads = np.ones((8, 1), F32)
    grads[slice(0) if bad is None else bad] = np.inf
    updates, found = run(grads)
    np.testing.assert_array_equal(np.ravel(updates), np.full(8, -(2.0**-16) if bad is None else 0))
    expected = (2.0**16, 1) if bad is None else (2.0**15, 0)
    np.testing.assert_array_equal(np.reshape(found, (8, 2)), [expected] * 8)


def test_sharded_gradients_are_judged_as_one_under_jit_and_move_between_no_devices():
  """The agreement is one scalar: no array of a parameter's size is gathered or reduced for it."""
  sharding = NamedSharding(mesh(), ROWS)
  put = lambda x: jax.device_put(x, sharding)
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  params = {"w": put(np.ones((16, 2), F32))}
  bad = np.ones((16, 2), F32)
  bad[13, 1] = np.nan
  state = jax.jit(tx.init, out_shardings=None)(params)
  state = jax.tree.map(
    lambda x: jax.device_put(x, sharding if x.ndim else NamedSharding(mesh(), WHOLE)), state
  )
  compiled = jax.jit(tx.update).lower(params, state, params).compile()
  collectives = [
    line for line in compiled.as_text().splitlines() if "all-reduce(" in line or "all-gather(" in line
  ]
  assert collectives
  assert not any(re.search(r"\[\d", line.split("all-")[0]) for line in collectives)
  updates, state = compiled({"w": put(bad)}, state, params)
  assert not state.grads_finite
  assert not np.asarray(updates["w"]).any()
  assert state.scale.sharding.is_fully_replicated
  assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(sharding, 2)


def test_one_trace_ahead_of_time_compilation_and_no_host_transfer():
  traces = []
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, grads = jax.tree.map(jnp.asarray, (PARAMS, GRADS))
  state = tx.init(params)
  shapes = jax.eval_shape(step, params, state, grads)
  assert jax.tree.structure(shapes[1]) == jax.tree.structure(state)
  compiled = step.lower(params, state, grads).compile()
  # All but what was finite in the last step, which no step reads.
  read = state._replace(grads_finite=None, updates_finite=None)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, read)))
  assert compiled.memory_analysis().alias_size_in_bytes == size
  traces.clear()
  jax.clear_caches()
  with jax.transfer_guard("disallow"):
    for _ in range(4):
      params, state = step(params, state, grads)
  assert len(traces) == 1


def test_a_skip_is_selects():
  tx = mpjax.with_loss_scaling(optax.adamw(0.1), "dynamic")
  text = jax.jit(tx.update).lower(PARAMS, tx.init(PARAMS), PARAMS).as_text()
  assert "stablehlo.case" not in text
  assert "stablehlo.if" not in text


def test_the_state_survives_a_trip_through_numpy_and_is_added_to_a_run_that_had_none():
  """As from a checkpoint, also in the middle of an accumulation."""
  inner = optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()
  tx = mpjax.dynamic_loss_scale(inner)
  step, plain = jax.jit(tx.update), jax.jit(inner.update)
  _, state = step(GRADS, tx.init(PARAMS), PARAMS)
  there, back = step(GRADS, state, PARAMS), step(GRADS, jax.tree.map(np.asarray, state), PARAMS)
  for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(back), strict=True):
    assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())
  old = inner.init(PARAMS)
  for _ in range(2):
    _, old = plain(GRADS, old, PARAMS)
  scaled = jax.tree.map(lambda g: g * F32(2.0**16), GRADS)
  updates, _ = step(scaled, tx.init(PARAMS)._replace(inner_state=old), PARAMS)
  jax.tree.map(close, updates, plain(GRADS, old, PARAMS)[0])


def raises(grads, state, params=None):
  raise NotImplementedError("no update")


def test_errors_of_the_wrapped_transform_and_of_its_state_are_raised_as_they_are():
  for update, error, message in (
    (raises, NotImplementedError, "no update"),
    (lambda g, s, p=None: (g, (g,)), ValueError, "changed the structure of its state"),
  ):
    tx = mpjax.static_loss_scale(optax.GradientTransformation(lambda p: (), update), 1.0)
    with pytest.raises(error, match=message):
      jax.eval_shape(tx.update, F32(1), tx.init(None))


def test_updates_can_be_differentiated():
  tx, plain = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=4.0), optax.adam(0.1)
  total = lambda tx, scale: lambda grads: tx.update(grads * scale, tx.init(grads))[0].sum()
  both = jax.jit(lambda grads: [jax.grad(total(*of))(grads) for of in ((tx, 4), (plain, 1))])
  np.testing.assert_allclose(*both(np.asarray([1e-9, -2e-9], F32)), rtol=1e-4)


def test_an_update_that_is_not_finite_on_one_device_is_taken_on_none():
  divides = optax.scale_by_rms(eps=0.0, initial_scale=0.0)  # 0 times infinity
  tx = mpjax.dynamic_loss_scale(divides, axis_name="d")

  def step(grads):
    updates, state = tx.update(grads, tx.init(grads))
    return updates, state.updates_finite[None], state.grads_finite[None]

  grads = np.ones((8, 1), F32)
  grads[5] = 0
  updates, *finite = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=ROWS, out_specs=ROWS))(grads)
  assert not np.asarray(updates).any()
  np.testing.assert_array_equal(finite, [[False] * 8, [True] * 8])
