"""Traps in which jmp, flax, optax and mpx are known to fall, with their results beside ours."""

import functools
import math

import jax
import jax.numpy as jnp
import jmp
import mpx
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import mpjax

F32 = np.float32
PARAMS = {"w": np.asarray([1.0, 2.0], F32)}
BAD = {"w": np.asarray([np.nan, 1.0], F32)}
ENDLESS = {"w": np.asarray([np.inf, 1.0], F32)}
SCALED = functools.partial(mpjax.dynamic_loss_scale, optax.identity())


def step(tx, grads, params=PARAMS):
  """The updates and the state of a first step, jitted; `grads` may be made of the first state."""
  make = grads if callable(grads) else lambda state: grads
  return jax.jit(lambda state: tx.update(make(state), state, params))(tx.init(params))


def first_updates(loss):
  """The updates of SGD for gradients of what `loss(scale_loss, params)` returns, and the state."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  scaled = lambda state: functools.partial(mpjax.scale_loss, opt_state=state)
  return step(tx, lambda state: jax.grad(functools.partial(loss, scaled(state)))(PARAMS))


def test_what_other_libraries_make_of_a_scale():
  # jmp forgets its floor when it is flattened, and jumps up to 1; and stays at infinity for ever.
  adjust = jax.jit(lambda scale: scale.adjust(jnp.asarray(False)))
  assert adjust(jmp.DynamicLossScale(F32(0.25), min_loss_scale=F32(2.0**-6))).loss_scale == 1
  assert adjust(jmp.DynamicLossScale(F32(math.inf))).loss_scale == math.inf
  # It divides in float16 unless its scale is float32.
  exact = float(np.float16(1e-3)) / 2**15
  for scale, right in ((2.0**15, False), (jnp.float32(2.0**15), True)):
    assert (float(jmp.StaticLossScale(scale).unscale(jnp.float16(1e-3))) == exact) == right
  assert float(step(SCALED(init_scale=2.0**15), {"w": np.float16(1e-3)})[0]["w"]) == exact
  # flax grows a step late, each time.
  scale, scales = DynamicScale(growth_interval=3, scale=F32(1)), []
  grow = jax.jit(lambda scale: scale.value_and_grad(jnp.sin)(1.0).dynamic_scale)
  for _ in range(8):
    scale = grow(scale)
    scales.append(float(scale.scale))
  assert scales == [1, 1, 1, 2, 2, 2, 2, 4]
  # mpx unscales by the adjusted scale: on each growth step its gradients are halved.
  updates, state = step(SCALED(init_scale=4.0, growth_interval=1), {"w": F32(12)})
  assert (float(updates["w"]), float(state.scale)) == (3, 8)
  scaling = mpx.DynamicLossScaling(jnp.float32(4), jnp.float32(1), period=1)
  assert float(mpx.filter_value_and_grad(lambda w: 3 * w, scaling)(jnp.float32(1))[3]) == 1.5
  # It takes every scale through float16, also for bfloat16, and cuts it to 65504: no power of two.
  scaling = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1), period=1)
  assert float(scaling.adjust(jnp.asarray(True)).loss_scaling) == 65504


def test_apply_if_finite_gives_up_and_asks_the_incoming_gradients_alone():
  peer, ours = optax.apply_if_finite(optax.sgd(0.1), 2), mpjax.dynamic_loss_scale(optax.sgd(0.1))
  for tx, finite in ((peer, False), (ours, True)):
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for _ in range(4):
      updates, state = update(BAD, state, PARAMS)
    assert np.isfinite(updates["w"]).all() == finite
  divides = optax.stateless(lambda grads, params: jax.tree.map(jnp.divide, grads, grads))
  zeros = {"w": np.zeros(2, F32)}
  updates, state = step(optax.apply_if_finite(divides, 5), zeros)
  assert np.isnan(updates["w"]).all()
  assert int(state.total_notfinite) == 0
  updates, state = step(mpjax.dynamic_loss_scale(divides), zeros)
  assert not np.asarray(updates["w"]).any()
  assert (bool(state.updates_finite), float(state.scale)) == (False, 2.0**16)


def test_a_guard_round_adam_alone_or_a_group_lets_the_rest_go_on():
  decay = optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0, 10))
  tail = (optax.add_decayed_weights(1.0), decay)
  peer = optax.chain(optax.apply_if_finite(optax.scale_by_adam(), 5), *tail)
  ours = mpjax.dynamic_loss_scale(optax.chain(optax.scale_by_adam(), *tail))
  for tx, goes_on in ((peer, True), (ours, False)):
    updates, state = step(tx, BAD)
    assert np.asarray(updates["w"]).any() == goes_on
    assert int((state if goes_on else state.inner_state)[2].count) == goes_on
  groups = {"a": optax.apply_if_finite(optax.adam(0.1), 5), "b": optax.apply_if_finite(optax.sgd(0.1), 5)}
  both = {"w": PARAMS["w"], "v": PARAMS["w"]}
  updates, _ = step(optax.partition(groups, {"w": "a", "v": "b"}), {**both, **BAD}, both)
  assert np.asarray(updates["v"]).any()


def test_a_clip_before_the_check_hides_an_overflow_and_its_norm_may_be_no_float16():
  assert np.isfinite(step(optax.clip(1.0), ENDLESS)[0]["w"]).all()
  _, state = step(mpjax.dynamic_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(0.1))), ENDLESS)
  assert not state.grads_finite
  grads = {"w": jnp.full(4, 300.0, jnp.float16)}
  clip = optax.clip_by_global_norm(1.0)
  assert not np.asarray(step(clip, grads)[0]["w"]).any()  # the norm is infinite in float16
  np.testing.assert_allclose(
    step(mpjax.static_loss_scale(clip, 1.0), grads)[0]["w"], np.full(4, 0.5), rtol=1e-6
  )


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
    updates, _ = step(mpjax.dynamic_loss_scale(optax.adam(0.1)), ENDLESS)
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


def test_policies_of_numpy_dtypes_have_a_string():
  policy = jmp.Policy(*[np.dtype("float16")] * 3)
  with pytest.raises(KeyError):  # as jmp's own have not
    str(policy)
  assert mpjax.get_policy(str(mpjax.get_policy(policy))) == mpjax.get_policy(policy)
