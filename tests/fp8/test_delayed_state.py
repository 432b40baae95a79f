"""Delayed scaling: the "gradient" of the state is the next one, inside scan, remat, vmap and shardings, and round them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import jit, named
from tests.fp8._delayed_programs import (
  INNER,
  LENGTH,
  NAMES,
  ROWS,
  C,
  D,
  W,
  X,
  act,
  amaxes,
  by_site,
  delayed,
  exact_batch,
  first_state,
  following,
  loss,
  mesh_of,
  net,
  newest,
  next_state,
  same,
)


def test_the_first_state():
  state = first_state(loss, W, X, C)
  assert set(state) == {"amax", "uses"}
  assert set(state["amax"]) == set(INNER)
  assert {a.shape for a in jax.tree.leaves(state["amax"])} == {(LENGTH,)}
  assert not any(np.asarray(a).any() for a in jax.tree.leaves(state["amax"]))
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (W, X, C))
  same(state, first_state(loss, *shapes))
  same(first_state(loss, W, X, C, policy="bf16")["amax"], {})
  every = first_state(loss, W, X, C, policy=delayed(first_layer=True, last_layer=True))
  assert set(every["amax"]) == {f":{i}" for i in range(5)}


def test_histories_roll():
  policy = delayed(margin=3)  # so that amaxes may grow without saturation
  state = first_state(loss, W, X, C, policy=policy)
  expected = np.zeros((LENGTH, 5, 3))
  for i in range(LENGTH + 2):
    batch = exact_batch(i, largest=2 ** (i % 3))
    state = following(loss, state, W, *batch, policy=policy)
    expected = np.concatenate([amaxes(W, *batch)[None], expected[:-1]])
    for site in range(3):
      for j, name in enumerate(NAMES):
        np.testing.assert_array_equal(state["amax"][f":{site}"][name], expected[:, site + 1, j])


def test_scales_come_from_the_history_and_saturate():
  fun = lambda w, x: x @ w[0] @ w[1] @ w[2]

  @jit
  def run(state, w, x):
    out, back = jax.vjp(lambda x: mpjax.autocast(fun, delayed(), fp8_state=state)(w, x), x)
    return out, back(jnp.full_like(out, 16))[0]

  # The scale is the largest power of two that an amax allows: 64 for 4 in E4M3, whose largest number is 448.
  rows = ([1, 4, 2, 0], 7), ([0, 0, 0, 0.5], 7 / 8)
  for (history, largest), operand in itertools.product(rows, NAMES):
    w = [np.eye(D, dtype=np.float32) * np.float32(16 if i == 1 and operand == "rhs" else 1) for i in range(3)]
    x = np.full((ROWS, D), 16 if operand == "lhs" else 1, np.float32)
    state = first_state(fun, w, x)
    state["amax"][":0"][operand] = np.array(history, np.float32)
    out, d_x = run(state, w, x)
    np.testing.assert_allclose(d_x if operand == "gradient" else out, largest, rtol=1e-2, err_msg=operand)


@pytest.mark.parametrize("length", [1, 4])
def test_a_scale_outlasts_steps_in_which_all_is_zero(length):
  policy = delayed(amax_history_len=length)
  state = first_state(loss, W, X, C, policy=policy)
  state = following(loss, state, W, *exact_batch(0, largest=4), policy=policy)
  known = {site: {name: max(h) for name, h in of.items()} for site, of in state["amax"].items()}
  zeros = [np.zeros_like(x) for x in exact_batch(1)]
  for _ in range(length + 2):
    state = following(loss, state, W, *zeros, policy=policy)
  for site, of in state["amax"].items():
    for name, history in of.items():
      assert max(history) == known[site][name]
  state = following(loss, state, W, *exact_batch(2, largest=1), policy=policy)
  assert newest(state) == by_site(amaxes(W, *exact_batch(2, largest=1)))


def test_batches_of_other_sizes_share_a_state():
  state = first_state(loss, W, X, C)
  same(state, first_state(loss, W, X[:17], C[:17]))  # a batch without FP8 products has that of larger ones
  for rows in (ROWS, 32):
    x, c = exact_batch(1, rows=rows)
    state = following(loss, state, W, x, c)
    assert newest(state) == by_site(amaxes(W, x, c))
  same(following(loss, state, W, X[:17], C[:17]), state)  # and leaves it alone


def test_a_state_is_not_lost_where_its_products_do_not_reach_the_loss():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  frozen = lambda w, x, c: jax.lax.stop_gradient(loss(w, x, c)) + w[0].sum()
  new = following(frozen, state, W, X, C)
  assert float(new["uses"]) == 1
  for site, of in new["amax"].items():
    for name, history in of.items():
      assert max(history) == max(state["amax"][site][name])


def test_a_product_that_a_state_does_not_have_is_scaled_by_its_own_amax():
  state = first_state(loss, W, X, C)
  del state["amax"][":1"]
  out = jit(lambda w: mpjax.autocast(loss, delayed(), fp8_state=state)(w, X, C))(W)
  np.testing.assert_allclose(out, loss(W, X, C), rtol=0.1)


def test_a_shared_layer_has_one_history():
  fun = lambda w, x, c: jnp.sum(act(act(act(x @ w[0]) @ w[1]) @ w[1]) @ w[2] * c)
  w = [W[0], W[1], W[4]]
  state = following(fun, first_state(fun, w, X, C), w, X, C)
  by_hand = amaxes([W[0], W[1], W[1], W[4]], X, C)
  assert newest(state) == {":0": list(by_hand[1:3].max(0))}


def test_amaxes_that_are_not_finite_are_not_remembered():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  value = jit(lambda state, x: mpjax.autocast(loss, delayed(), fp8_state=state)(W, x, C))
  for bad in (np.nan, np.inf):
    x = X.copy()
    x[0, 0] = bad
    new = following(loss, state, W, x, C)
    leaves = jax.tree.leaves(new)
    assert np.isfinite(np.concatenate([np.ravel(a) for a in leaves])).all()
    for site, of in new["amax"].items():
      assert float(of["lhs"][0]) == 0
      assert float(of["lhs"][1]) == INNER[site][0]
      assert float(of["rhs"][0]) == INNER[site][1]
    assert not np.isfinite(value(state, x))


WRONG = {
  "none": (lambda: None, "recipe 'delayed'.*fp8_state=state"),
  "of another function": (
    lambda: first_state(lambda w, x: jax.named_scope("other")(net)(w, x), W, X),
    "to another function.*histories of other, other:1.*here are :0, :1, :2; .*init_fp8_state",
  ),
  "of another length": (
    lambda: first_state(loss, W, X, C, policy=delayed(amax_history_len=7)),
    r"history .* of :\d has shape \(7,\).*amax_history_len is 4",
  ),
  "no state": (lambda: {"params": 1}, "fp8_state of type dict"),
  "a list": (lambda: [1], "fp8_state of type list"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_states_that_are_wrong(make, message):
  with pytest.raises(ValueError, match=message):
    mpjax.autocast(loss, delayed(), fp8_state=make())(W, X, C)


def test_other_recipes_need_no_state():
  policy = delayed()
  policy["fp8"] = {"recipe": "current", "emulate": True, "min_dim": 16}
  assert first_state(loss, W, X, C, policy=policy)["amax"] == {}
  state = first_state(loss, W, X, C)
  for fun in (
    mpjax.autocast(loss, policy),
    mpjax.autocast(loss, mpjax.get_policy(delayed()).without_histories()),
    mpjax.autocast(loss, policy, fp8_state=state),
  ):
    assert len(named("fp8_dot_general", fun, W, X, C)) == 3


# Transforms

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
