"""Loss scaling under vmap, shard_map, pmap and sharded parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpjax
from tests.step._problems import mesh

F32 = np.float32
ROWS, WHOLE = PartitionSpec("d"), PartitionSpec()


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
    run = jax.jit(jax.shard_map(step, mesh=mesh(d=8), in_specs=ROWS, out_specs=ROWS, check_vma=vma))
  for bad in (None, 0, 5):
    grads = np.ones((8, 1), F32)
    grads[slice(0) if bad is None else bad] = np.inf
    updates, found = run(grads)
    np.testing.assert_array_equal(np.ravel(updates), np.full(8, -(2.0**-16) if bad is None else 0))
    expected = (2.0**16, 1) if bad is None else (2.0**15, 0)
    np.testing.assert_array_equal(np.reshape(found, (8, 2)), [expected] * 8)


def test_an_update_that_is_not_finite_on_one_device_is_taken_on_none():
  divides = optax.scale_by_rms(eps=0.0, initial_scale=0.0)  # 0 times infinity
  tx = mpjax.dynamic_loss_scale(divides, axis_name="d")

  def step(grads):
    updates, state = tx.update(grads, tx.init(grads))
    return updates, state.updates_finite[None], state.grads_finite[None]

  grads = np.ones((8, 1), F32)
  grads[5] = 0
  updates, *finite = jax.jit(jax.shard_map(step, mesh=mesh(d=8), in_specs=ROWS, out_specs=ROWS))(grads)
  assert not np.asarray(updates).any()
  np.testing.assert_array_equal(finite, [[False] * 8, [True] * 8])
