"""Delayed scaling: the "gradient" with respect to the state is the next state, whatever happens to the state."""

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
  net,
  newest,
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
