"""`check_loss_scaling` of steps and losses: a scale that nobody applies, and backward rules that are not linear."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.loss_scale import check_loss_scaling
from tests.models._nnx import Normed

F32 = np.float32
RNG = np.random.default_rng(0)
PARAMS = {"w": F32(RNG.normal(size=(8, 8)) / 3), "v": np.full((8, 2), 1 / 3, F32)}
BATCH = {"x": F32(RNG.normal(size=(16, 8))), "y": np.ones((16, 2), F32)}

NET = functools.partial(Normed, 8, 2)


@jax.custom_vjp
def clipped(x):
  """The identity, whose cotangent is clipped: scaled cotangents are cut, where those of the loss would not be."""
  return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def loss_fn(params, batch, of_hidden=lambda hidden: hidden):
  hidden = of_hidden(jnp.tanh(batch["x"] @ params["w"]))
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


noisy = jax.custom_vjp(lambda x: x.sum())
# Rounding noise round a gradient of zero, which is the same at every scale.
noisy.defvjp(lambda x: (x.sum(), x), lambda x, g: (jnp.full_like(x, 1e-9),))


clipping_loss = functools.partial(loss_fn, of_hidden=clipped)


def own_step(tx, differentiate, **jit):
  """A step of one's own whose gradients are `differentiate(loss, opt_state)(params, batch)`."""
  run = mpjax.autocast(loss_fn, "fp16")

  @functools.partial(jax.jit, **jit)
  def step(params, opt_state, batch):
    loss, grads = differentiate(run, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def by_scale_loss(fun, opt_state):
  return jax.value_and_grad(lambda *args: mpjax.scale_loss(fun(*args), opt_state))


def unscaled(fun, _):
  return jax.value_and_grad(fun)


BYPASSED = r"do not belong to the scaled loss.*mpjax\.value_and_grad\(loss_fn, opt_state\)\(params, batch\)"


@pytest.mark.parametrize("right", [by_scale_loss, mpjax.value_and_grad])
def test_a_right_step_passes_and_one_of_the_plain_loss_is_told_the_line_to_write(right):
  tx = mpjax.with_loss_scaling(optax.adam(1e-3), "fp16")
  params, state = jax.tree.map(jnp.asarray, (PARAMS, tx.init(PARAMS)))
  with pytest.raises(ValueError, match=BYPASSED):
    check_loss_scaling(own_step(tx, unscaled), params, state, BATCH)
  before = jax.tree.map(np.array, (params, state))
  check_loss_scaling(own_step(tx, right, donate_argnums=(0, 1)), params, state, batch=BATCH)
  # Arguments are neither changed nor donated.
  jax.tree.map(np.testing.assert_array_equal, (params, state), before)


def nnx_loss(model, batch, of_out=lambda out: out):
  return jnp.mean((of_out(model(batch["x"])) - batch["y"]) ** 2)


@pytest.mark.parametrize("right", [True, False])
def test_an_nnx_optimizer_that_changes_in_place(right):
  model = NET()
  optimizer = nnx.Optimizer(model, mpjax.with_loss_scaling(optax.adam(1e-3), "fp16"), wrt=nnx.Param)
  run = mpjax.autocast(nnx_loss, "fp16")

  @nnx.jit
  def step(model, optimizer, batch):
    of = mpjax.value_and_grad(run, optimizer) if right else nnx.value_and_grad(run)
    loss, grads = of(model, batch)
    optimizer.update(model, grads)
    return loss

  values = lambda: jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))
  before = values()
  message = r"mpjax\.value_and_grad\(loss_fn, optimizer\)\(model, batch\)"
  with contextlib.nullcontext() if right else pytest.raises(ValueError, match=message):
    check_loss_scaling(step, model, optimizer, BATCH)
  jax.tree.map(np.testing.assert_array_equal, before, values())
  assert float(mpjax.get_loss_scale(optimizer).scale) == 2.0**16


def test_a_step_that_make_train_step_made():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "fp16")
  state = step.init(PARAMS)
  check_loss_scaling(step, state, BATCH)
  step(state, BATCH)  # which was not donated
  clipping = mpjax.make_train_step(clipping_loss, optax.adam(1e-3), "fp16")
  with pytest.raises(ValueError, match=r"gradient of w depends on the loss scale: unscaled, its norm is"):
    check_loss_scaling(clipping, clipping.init(PARAMS), BATCH)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_loss_function_whose_backward_rule_clips(policy):
  check_loss_scaling(mpjax.autocast(loss_fn, policy), PARAMS, BATCH)
  # As the message says: full precision does not help.
  for wrong in (clipping_loss, mpjax.full_precision(clipping_loss)):
    with pytest.raises(ValueError, match="gradient of w depends on the loss scale") as error:
      check_loss_scaling(mpjax.autocast(wrong, policy), PARAMS, BATCH)
  for word in ("custom_vjp", "full_precision does not change that", "divide by the scale first", "'bf16'"):
    assert word in str(error.value)


def test_right_losses_pass():
  for fun, *args in (
    (lambda p, b: (loss_fn(p, b), {"rows": 16}), PARAMS, BATCH),
    (lambda p, b: mpjax.Average(16 * loss_fn(p, b), 16), PARAMS, BATCH),
    (lambda w, train: jnp.sum(w**2) if train else 0.0, PARAMS["w"], True),
    (mpjax.autocast(lambda p, b: 1e-6 * loss_fn(p, b), "fp16"), PARAMS, BATCH),  # which underflows
    (mpjax.autocast(nnx_loss, "fp16"), NET(), BATCH),
    (lambda p: jnp.sum(p["w"]) + noisy(p["v"]), PARAMS),
  ):
    check_loss_scaling(fun, *args)
  with pytest.raises(ValueError, match=r"gradient of (linear|norm)"):
    check_loss_scaling(functools.partial(nnx_loss, of_out=clipped), NET(), BATCH)


SGD = optax.sgd(0.1)
MADE = mpjax.make_train_step(loss_fn, SGD, "bf16")
SCALED_STATE = mpjax.dynamic_loss_scale(SGD).init(PARAMS)
# What the error says, and the arguments.
MISTAKES = {
  "ValueError: no loss scale": (MADE, MADE.init(PARAMS), BATCH),
  "no loss scale": (lambda m, o, b: None, NET(), nnx.Optimizer(NET(), SGD, wrt=nnx.Param), BATCH),
  "returned a tuple.*none of its arguments holds": (lambda p, s: (p, s), PARAMS, SGD.init(PARAMS)),
  "updates no loss scale": (lambda p, s: p, PARAMS, SCALED_STATE),
  "not finite at any loss scale.*find_nonfinite": (lambda p: jnp.sum(jnp.sqrt(p["v"] - 1)), PARAMS),
  r"TypeError: .*check_loss_scaling\(step, state, batch\)": (loss_fn,),
  "TypeError: .*of a dict": (PARAMS, loss_fn),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
  with pytest.raises((TypeError, ValueError)) as error:
    check_loss_scaling(*MISTAKES[message])
  assert re.search(message, f"{error.typename}: {error.value}")
