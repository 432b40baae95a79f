"""Delayed scaling inside scan, remat, vmap and shardings, round them, and under derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import jit
from tests.fp8._delayed_programs import (
  INNER,
  ROWS,
  C,
  D,
  W,
  X,
  act,
  delayed,
  first_state,
  following,
  loss,
  mesh_of,
  newest,
  next_state,
)

P = jax.sharding.PartitionSpec


def parts(batch, n):
  return batch.reshape(n, -1, D)


def per_layer(wrap):
  def fun(w, x, c):
    layer = wrap(lambda x, w: act(x @ w))
    for own in w[:-1]:
      x = layer(x, own)
    return jnp.sum(x @ w[-1] * c)

  return fun


def over_devices(w, x, c):
  local = lambda w, x, c: jax.lax.psum(loss(w, x, c), "d")
  return jax.shard_map(local, mesh=mesh_of(4), in_specs=(P(), P("d"), P("d")), out_specs=P())(w, x, c)


def in_scan(step):
  def fun(w, x, c):
    x, _ = jax.lax.scan(step, act(x @ w[0]), jnp.stack(w[1:-1]))
    return jnp.sum(x @ w[-1] * c)

  return fun


def layer_step(x, w):
  return act(x @ w), None


def in_cond(w, x, c):
  x = act(x @ w[0])
  good, bad = (lambda x: act(act(act(x @ w[1]) @ w[2]) @ w[3])), (lambda x: x @ (64 * w[1]))
  return jnp.sum(jax.lax.cond(x[0, 0] > -1e9, good, bad, x) @ w[-1] * c)


def micro_batches(w, x, c):
  step = lambda total, xc: (total + loss(w, *xc), None)
  return jax.lax.scan(step, 0.0, (parts(x, 4), parts(c, 4)))[0]


ONE_SITE = [[max(column) for column in zip(*INNER.values(), strict=True)]]
EACH_SITE = sorted(INNER.values())
PROGRAMS = {
  "plain": (loss, EACH_SITE),
  "jit of layers": (per_layer(jax.jit), EACH_SITE),
  "remat of layers": (per_layer(jax.checkpoint), EACH_SITE),
  "scan": (in_scan(layer_step), ONE_SITE),
  "scan of remat": (in_scan(jax.checkpoint(layer_step)), ONE_SITE),
  "micro-batches in a scan": (micro_batches, EACH_SITE),
  "shard_map": (over_devices, EACH_SITE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_amaxes_are_the_largest_of_all_uses(name):
  fun, expected = PROGRAMS[name]
  state = first_state(fun, W, X, C)
  new = following(fun, state, W, X, C)
  assert sorted(newest(new).values()) == expected
  again = following(fun, new, W, X, C)
  assert sorted(newest(again).values()) == expected
  assert {tuple(np.asarray(h)[2:]) for h in jax.tree.leaves(again["amax"])} == {(0.0, 0.0)}


def test_cond_counts_the_branch_that_is_taken():
  new = following(in_cond, first_state(in_cond, W, X, C), W, X, C)
  assert sorted(row for row in newest(new).values() if any(row)) == EACH_SITE


@pytest.mark.parametrize(("recompute", "saved"), [("nothing", "compute"), ("islands", "fp8")])
def test_whatever_is_kept_for_the_backward_pass(recompute, saved):
  policy = delayed(saved_activations=saved)
  state = first_state(loss, W, X, C, policy=policy)
  assert newest(following(loss, state, W, X, C, policy=policy, recompute=recompute)) == INNER


@pytest.mark.parametrize(
  ("shape", "of_w", "of_x"),
  [((2, 2), P(None, "m"), P("d")), ((2, 2), P("m"), P("d", "m"))],
  ids=["both", "contracted"],
)
def test_sharded_data_give_the_state_of_one_device(shape, of_w, of_x):
  mesh = mesh_of(*shape)
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  state = put(first_state(loss, W, X, C), P())
  new = following(loss, state, [put(w, of_w) for w in W], put(X, of_x), put(C, of_x))
  assert newest(new) == INNER


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_within_shard_map(check_vma):
  mesh = mesh_of(4)
  state = first_state(loss, W, X[: ROWS // 4], C[: ROWS // 4])

  def local(state, x, c):
    new = next_state(loss, state, W, x, c)
    return new if check_vma else jax.tree.map(lambda a: jax.lax.pmax(a, "d"), new)

  run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check_vma)
  assert newest(jit(run)(state, X, C)) == INNER


def test_gradients_beside_the_state_are_exact():
  state = first_state(loss, W, X, C)
  of = lambda w, state: mpjax.autocast(loss, delayed(), fp8_state=state)(w, X, C)
  step, exact = jit(jax.grad(of, (0, 1))), jit(jax.grad(loss))(W, X, C)
  for _ in range(3):
    grads, state = step(W, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2), grads, exact)


def test_a_while_loop_can_be_run():
  def fun(w, x):
    body = lambda c: (c[0] + 1, act(c[1] @ w[1]))
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x @ w[0]))[1] @ w[2]

  state = first_state(fun, W, X)
  assert set(state["amax"]) == {":0"}
  np.testing.assert_array_equal(mpjax.autocast(fun, delayed(), fp8_state=state)(W, X), fun(W, X))


def test_autocast_of_a_gradient_does_not_scale_gradients_by_activations():
  large = lambda w, x, c: 2.0**14 * loss(w, x, c)
  state = following(large, first_state(large, W, X, C), W, X, C)
  grads = jit(mpjax.autocast(jax.grad(large), delayed(), fp8_state=state))(W, X, C)
  for ours, reference in zip(grads, jit(jax.grad(large))(W, X, C), strict=True):
    np.testing.assert_allclose(ours, reference, rtol=0.1)
