"""Delayed scaling in modules, in training steps and through a loss scale: the state is kept, and rolled back."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.fp8._delayed_programs import (
  INNER,
  C,
  D,
  W,
  X,
  amaxes,
  by_site,
  delayed,
  first_state,
  loss,
  newest,
  same,
)


def test_plain_trees_through_a_loss_scale():
  tx = mpjax.dynamic_loss_scale(optax.adam(1e-3), init_scale=2.0**4)
  tree = {"params": W, "_overwrite_with_gradient": first_state(loss, W, X, C)}
  opt_state = tx.init(tree)

  def scaled(tree, opt_state, x):
    own = mpjax.autocast(loss, delayed(), fp8_state=tree["_overwrite_with_gradient"])
    return mpjax.scale_loss(own(tree["params"], x, C), opt_state)

  @jax.jit
  def step(tree, opt_state, x):
    grads = jax.grad(scaled)(tree, opt_state, x)
    updates, opt_state = tx.update(grads, opt_state, tree)
    return mpjax.apply_updates(tree, updates), opt_state

  new, opt_state = step(tree, opt_state, X)
  by_hand = amaxes(W, X, C) * [1, 1, 2.0**4]
  assert newest(new["_overwrite_with_gradient"]) == by_site(by_hand)
  assert float(np.abs(new["params"][1] - W[1]).max()) > 0
  bad = X.copy()
  bad[0] = np.inf
  after, opt_state = step(new, opt_state, bad)
  same(after, new)
  assert float(opt_state.scale) == 2.0**3


# Steps


def as_dict(w):
  return {f"w{i}": layer for i, layer in enumerate(w)}


def loss_fn(params, batch):
  return loss([params[f"w{i}"] for i in range(5)], batch["x"], batch["c"])


BATCH = {"x": X, "c": C}


OPTIMIZERS = {"none": optax.sgd(0.0), "adam": optax.adam(1e-3)}


@functools.cache
def step_of(policy, optimizer, **options):
  return mpjax.make_train_step(loss_fn, OPTIMIZERS[optimizer], policy, donate=False, **options)


def started(policy=None, optimizer="none", **options):
  """A step, compiled once for several tests, and its first state."""
  step = step_of(mpjax.get_policy(policy or delayed()), optimizer, **options)
  return step, step.init(as_dict(W), batch=BATCH)


def with_loss_scale(dtype="float16", scale=2.0**10):
  return {**delayed(), "compute_dtype": dtype, "loss_scaling": {"init_scale": scale}}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_keeps_the_state(accumulate):
  options = {"accumulate": accumulate} if accumulate > 1 else {}
  step, state = started(**options)
  assert set(state.fp8_state["amax"]) == set(INNER)
  for i in range(3):
    state, _ = step(state, BATCH)
    assert newest(state.fp8_state) == INNER
    history = np.asarray(state.fp8_state["amax"][":1"]["lhs"])
    assert np.count_nonzero(history) == i + 1
  assert float(state.fp8_state["uses"]) == 1


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "float16"), (2, "bfloat16")])
def test_a_skipped_step_rolls_the_state_back(accumulate, dtype):
  options = {"accumulate": accumulate} if accumulate > 1 else {}
  step, state = started(with_loss_scale(dtype), "adam", **options)
  state, _ = step(state, BATCH)
  bad = X.copy()
  bad[-1, -1] = np.nan
  after, metrics = step(state, {"x": bad, "c": C})
  assert not bool(metrics["grads_finite"])
  same(after.fp8_state, state.fp8_state)
  same(after.params, state.params)
  after, metrics = step(after, BATCH)
  assert bool(metrics["grads_finite"])


def test_a_step_without_a_loss_scale_forgets_what_is_not_finite():
  step, state = started()
  state, _ = step(state, BATCH)
  bad = X.copy()
  bad[-1, -1] = np.inf
  after, _ = step(state, {"x": bad, "c": C})
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.fp8_state))
  guarded, state = started(skip_nonfinite=True)
  state, _ = guarded(state, BATCH)
  after, _ = guarded(state, {"x": bad, "c": C})
  same(after.fp8_state, state.fp8_state)


def test_a_step_says_what_it_lacks():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), delayed())
  with pytest.raises(ValueError, match=r"keeps a history of each product.*batch=batch"):
    step.init(as_dict(W))
  with pytest.raises(ValueError, match="fp8_state"):
    step(mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16").init(as_dict(W)), BATCH)
  model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
  step = mpjax.make_train_step(lambda m, b: (m(b["x"]) ** 2).mean(), optax.sgd(0.1), delayed())
  with pytest.raises(ValueError, match=r"histories in a TrainState.*step\.init"):
    step(model, nnx.Optimizer(model, step.tx, wrt=nnx.Param), BATCH)


def test_the_history_of_gradients_grows_with_the_loss_scale_which_is_not_taken_from_it():
  for interval, growth in ((1, 2), (1000, 1)):
    scaling = {"init_scale": 2.0**4, "growth_interval": interval}
    step, state = started({**with_loss_scale(), "loss_scaling": scaling})
    state, metrics = step(state, BATCH)
    assert bool(metrics["grads_finite"])
    assert newest(state.fp8_state) == by_site(amaxes(W, X, C) * [1, 1, growth * 2.0**4])
