"""Equinox modules as parameters: floating arrays are trained, all else is kept and given back as it was."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.step._problems import BATCH, FP16, assert_near, mesh, train


class Model(eqx.Module):
  """One with a leaf of each kind."""

  hidden: eqx.nn.Linear
  layers: list
  activation: Callable
  times: int
  slope: float
  is_scaled: bool
  name: str
  nothing: None
  key: jax.Array
  permutation: jax.Array
  sizes: tuple = eqx.field(static=True)

  def __init__(self, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    self.hidden = eqx.nn.Linear(4, 16, key=keys[0])
    self.layers = [eqx.nn.LayerNorm(16), eqx.nn.Dropout(0.1), eqx.nn.MLP(16, 1, 16, 1, key=keys[1])]
    self.activation, self.times, self.slope = jax.nn.gelu, 2, 0.5
    self.is_scaled, self.name, self.nothing, self.sizes = True, "model", None, (4, 16)
    self.key, self.permutation = jax.random.key(3), jnp.arange(16)[::-1]

  def __call__(self, x):
    x = self.activation(self.hidden(x))[self.permutation]
    for _ in range(self.times):
      x = self.layers[1](self.layers[0](x), key=self.key)
    return self.layers[2](x * self.slope if self.is_scaled else x)


MODEL = Model()
TX = optax.adam(1e-2)


def loss_fn(model, batch):
  return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def make(policy="fp32", **options):
  return mpjax.make_train_step(loss_fn, TX, policy, **options)


@functools.cache
def by_hand():
  """The model after three steps of plain Equinox and optax, and the last loss."""

  @eqx.filter_jit
  def update(model, opt_state):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, BATCH)
    updates, opt_state = TX.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss

  model, opt_state = MODEL, TX.init(eqx.filter(MODEL, eqx.is_inexact_array))
  for _ in range(3):
    model, opt_state, loss = update(model, opt_state)
  return model, loss


def assert_same_but_trained(model):
  """The model has what the first one has, but for its floating arrays."""
  assert jax.tree.structure(model) == jax.tree.structure(MODEL)
  for ours, first in zip(jax.tree.leaves(model), jax.tree.leaves(MODEL), strict=True):
    if not eqx.is_inexact_array(first):
      assert type(ours) is type(first)
      assert np.all(ours == first)
      assert eqx.is_array(first) or ours is first


MESH = mesh(data=2, fsdp=4)


@pytest.mark.parametrize(
  "options",
  [
    {"accumulate": 2},
    {"mesh": MESH, "gather": "block", "policy": FP16},
    {"policy": {"base": "bf16", "autocast": False}},
    {"policy": "bf16_lean"},
  ],
  ids=["micro-batches", "mesh by block", "bf16, by casts", "few bytes"],
)
def test_a_module_is_trained_as_by_hand(options):
  step = make(**options)
  state, metrics = train(step, step.init(MODEL), 3)
  model, loss = by_hand()
  exact = options.get("policy") is None
  assert_near(metrics["loss"], loss, rtol=1e-4 if exact else 0.02)
  for found in (state.params, step.user_state(state)[0]):
    assert_same_but_trained(found)
    if exact:
      of = lambda model: eqx.filter(model, eqx.is_inexact_array)
      assert_near(of(found), of(model), rtol=1e-3, atol=1e-4)
  assert jax.vmap(state.params)(BATCH["x"]).shape == (16, 1)


def test_what_is_chosen_of_a_module():
  flags = eqx.tree_at(lambda m: m.hidden.bias, jax.tree.map(lambda _: False, MODEL), True)
  for wrt in ("hidden/bias", flags, lambda path, leaf: path == "hidden/bias"):
    step = make(wrt=wrt)
    state = train(step, step.init(MODEL), 1)[0]
    model = state.params
    assert_same_but_trained(model)
    assert not np.array_equal(model.hidden.bias, MODEL.hidden.bias)
    assert model.hidden.weight.tobytes() == MODEL.hidden.weight.tobytes()
    assert len([x for x in jax.tree.leaves(state.opt_state) if x.shape]) == 2
  state = make(wrt=".*").init(MODEL)  # of which an integer cannot be trained
  assert_same_but_trained(state.params)


def test_a_state_of_the_module_is_a_model_state():
  def loss(model, batch, model_state):
    run = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
    x, model_state = run(batch["x"], model_state)
    return jnp.mean((x - batch["y"]) ** 2), {}, model_state

  model, model_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="rows", mode="batch")
  step = mpjax.make_train_step(loss, optax.sgd(0.1), FP16)
  state, metrics = step(step.init(model, model_state=model_state), BATCH)
  assert np.isfinite(metrics["loss"])
  means = state.model_state.get(state.params.batch_state_index)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(means))
