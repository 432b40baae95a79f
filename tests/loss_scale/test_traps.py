"""Traps of loss scaling: which gradients count, what monitors see, and sums of many micro batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

F32 = np.float32
PARAMS = {"w": np.asarray([1.0, 2.0], F32)}


def step(tx, grads):
  """The updates and the state of a first step, jitted; `grads` may be made of the first state."""
  make = grads if callable(grads) else lambda state: grads
  return jax.jit(lambda state: tx.update(make(state), state, PARAMS))(tx.init(PARAMS))


def first_updates(loss):
  """The updates of SGD for gradients of what `loss(scale_loss, params)` returns, and the state."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  scaled = lambda state: functools.partial(mpjax.scale_loss, opt_state=state)
  return step(tx, lambda state: jax.grad(functools.partial(loss, scaled(state)))(PARAMS))


def test_gradients_of_scaled_losses():
  # Gradients decide; a loss that is NaN is for the user to look at (trap 13).
  updates, state = first_updates(lambda scale, p: scale(p["w"].sum() + jax.lax.stop_gradient(jnp.nan)))
  assert state.grads_finite
  np.testing.assert_array_equal(updates["w"], [-1, -1])
  # A scaled loss that float32 holds, whose first half-precision gradient float16 does not (trap 14).
  _, state = first_updates(lambda scale, p: scale((p["w"].astype(jnp.float16) * 5).sum().astype(jnp.float32)))
  assert (bool(state.grads_finite), float(state.scale)) == (False, 2.0**15)
  # Two losses under one scale: both are multiplied by it, and their gradients added (trap 15).
  updates, _ = first_updates(lambda scale, p: scale(p["w"].sum()) + scale((p["w"] ** 2).sum()))
  np.testing.assert_allclose(updates["w"], [-3.0, -5.0])
  # Double backward: the inner gradients are of the unscaled loss (trap 31).
  cubes = lambda w: (w**3).sum()
  penalised = lambda w: cubes(w) + (jax.grad(cubes)(w) ** 2).sum()
  updates, _ = first_updates(lambda scale, p: scale(penalised(p["w"])))
  np.testing.assert_allclose(updates["w"], [-3.0 - 36, -12 - 288], rtol=1e-6)


def test_debug_nans_is_quiet_on_an_overflow_to_infinity():
  """What `jax_debug_nans` stops at is NaN: an overflow that is skipped passes it (trap 34)."""
  with jax.debug_nans(True):
    updates, _ = step(mpjax.dynamic_loss_scale(optax.adam(0.1)), {"w": np.asarray([np.inf, 1.0], F32)})
  assert not np.asarray(updates["w"]).any()


def test_the_scale_and_what_is_inside_are_found_by_optax_itself():
  """One key of its own in the whole state, and monitors inside see unscaled updates (trap 26)."""
  tx = mpjax.dynamic_loss_scale(optax.chain(optax.ema(0.0), optax.adam(0.1)), init_scale=8.0)
  _, state = step(tx, {"w": np.asarray([8.0, 16.0], F32)})
  assert bool(optax.tree.get(state, "grads_finite"))
  np.testing.assert_array_equal(optax.tree.get(state, "ema")["w"], [1.0, 2.0])


def test_micro_batches_of_half_precision_are_added_in_float32():
  """4096 ones in bfloat16 stall at 256 (trap 30)."""
  summed = optax.MultiSteps(optax.sgd(1.0), 512, use_grad_mean=False).gradient_transformation()
  tx = mpjax.dynamic_loss_scale(summed)
  params = {"w": np.zeros((), F32)}

  def micro_step(carry, _):
    params, state = carry
    updates, state = tx.update({"w": state.scale.astype(jnp.bfloat16)}, state, params)
    return (optax.apply_updates(params, updates), state), None

  run = jax.jit(lambda *carry: jax.lax.scan(micro_step, carry, None, length=512)[0][0])
  assert float(run(params, tx.init(params))["w"]) == -512
