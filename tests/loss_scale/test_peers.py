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

PARAMS = {"w": jnp.asarray([1.0, 2.0])}
SCALED = functools.partial(mpjax.dynamic_loss_scale, optax.identity())


def walk(state, tx, finite_steps):
  step = jax.jit(lambda state, finite: tx.update({"w": jnp.where(finite, 1.0, jnp.nan)}, state)[1])
  scales = []
  for finite in finite_steps:
    state = step(state, finite)
    scales.append(float(state.scale))
  return scales


def test_the_floor_survives_jit():
  tx = SCALED(init_scale=0.25, min_scale=2.0**-6)
  assert walk(tx.init(PARAMS), tx, [False] * 6)[-1] == 2.0**-6
  # jmp forgets its floor when it is flattened, and jumps up to 1.
  scale = jmp.DynamicLossScale(jnp.float32(0.25), min_loss_scale=jnp.float32(2.0**-6))
  assert float(jax.jit(lambda s: s.adjust(jnp.asarray(False)))(scale).loss_scale) == 1


def test_a_float16_scale_can_be_adjusted():
  tx = SCALED(init_scale=jnp.float16(2**15).item())
  assert walk(tx.init(PARAMS), tx, [False]) == [2.0**14]
  with pytest.raises(TypeError):
    jmp.DynamicLossScale(jnp.float16(2**15)).adjust(jnp.asarray(True))


def test_an_infinite_scale_cannot_come_to_be_and_is_refused():
  tx = SCALED(init_scale=2.0**120, max_scale=2.0**126, growth_interval=1)
  assert max(walk(tx.init(PARAMS), tx, [True] * 20)) == 2.0**126
  with pytest.raises(ValueError, match="init_scale=inf"):
    SCALED(init_scale=math.inf)
  # jmp stays there for ever.
  scale = jmp.DynamicLossScale(jnp.float32(math.inf))
  assert float(scale.adjust(jnp.asarray(False)).loss_scale) == math.inf


def test_a_state_can_be_lowered_ahead_of_time():
  tx = SCALED()
  jax.jit(tx.update).lower(PARAMS, tx.init(PARAMS)).compile()
  with pytest.raises(TypeError):
    jax.jit(lambda s: s.adjust(jnp.asarray(True))).lower(jmp.DynamicLossScale(jnp.float32(8)))


def test_growth_is_on_the_nth_finite_step():
  tx = SCALED(init_scale=1.0, growth_interval=3)
  assert walk(tx.init(PARAMS), tx, [True] * 8) == [1, 1, 2, 2, 2, 4, 4, 4]
  scale, scales = DynamicScale(growth_interval=3, scale=jnp.float32(1)), []
  for _ in range(8):
    scale = scale.value_and_grad(jnp.sin)(1.0).dynamic_scale
    scales.append(float(scale.scale))
  assert scales == [1, 1, 1, 2, 2, 2, 2, 4]  # a step late, each time


def test_a_float16_loss_is_scaled_in_float32_and_traced_once():
  traces = []

  def loss_fn(w):
    traces.append(1)
    return (w.astype(jnp.float16) ** 2).sum() * jnp.float16(100)

  tx = mpjax.dynamic_loss_scale(optax.sgd(1e-4))

  @jax.jit
  def step(params, state):
    def of(w):
      loss = loss_fn(w)
      return mpjax.scale_loss(loss, state), loss

    (_, loss), grads = jax.value_and_grad(of, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  w, state = PARAMS["w"], tx.init(PARAMS["w"])
  for _ in range(3):
    w, state, loss = step(w, state)
    assert np.isfinite(loss)
  assert len(traces) == 1

  # flax: 65536 is not a float16, so the first loss is NaN; and the second step is traced again.
  traces.clear()
  peer = jax.jit(lambda scale, w: scale.value_and_grad(loss_fn)(w))
  scale, _, first, _ = peer(DynamicScale(), PARAMS["w"])
  peer(scale, PARAMS["w"])
  assert np.isnan(first)
  assert len(traces) == 2


def test_the_ceiling_is_a_power_of_two():
  tx = SCALED(init_scale=2.0**125, max_scale=2.0**126, growth_interval=1)
  assert walk(tx.init(PARAMS), tx, [True, True, False]) == [2.0**126, 2.0**126, 2.0**125]
  scale = DynamicScale(growth_interval=0, scale=jnp.float32(2.0**127))
  scale = scale.value_and_grad(lambda x: x * 0)(jnp.float32(1)).dynamic_scale
  assert math.frexp(float(scale.scale))[0] != 0.5


def test_overwritten_leaves_are_not_divided_by_the_scale():
  params = {"params": {"w": jnp.float32(2)}, "_overwrite_with_gradient": {"amax": jnp.float32(1)}}
  loss = lambda p: p["params"]["w"] * p["_overwrite_with_gradient"]["amax"]
  tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=8.0)
  grads = {"params": {"w": jnp.float32(8)}, "_overwrite_with_gradient": {"amax": jnp.float32(7)}}
  updates, _ = tx.update(grads, tx.init(params), params)
  assert float(updates["_overwrite_with_gradient"]["amax"]) == 7
  grad = DynamicScale(scale=jnp.float32(8)).value_and_grad(loss)(params).grad
  assert float(grad["_overwrite_with_gradient"]["amax"]) == 2  # unscaled like any gradient


def test_a_growth_step_reports_the_gradients_it_was_given():
  """mpx unscales by the adjusted scale: on each growth step its gradients are halved."""
  tx = SCALED(init_scale=4.0, growth_interval=1)
  updates, state = tx.update({"w": jnp.float32(12)}, tx.init(PARAMS))
  assert (float(updates["w"]), float(state.scale)) == (3, 8)
  scaling = mpx.DynamicLossScaling(jnp.float32(4), jnp.float32(1), period=1)
  _, _, _, grads = mpx.filter_value_and_grad(lambda w: 3 * w, scaling)(jnp.float32(1))
  assert float(grads) == 1.5


def test_any_scale_stays_exact_and_fits_any_half_precision():
  """mpx takes every scale through float16, also for bfloat16, and cuts it to 65504: no power of two."""
  tx = SCALED(init_scale=2.0**17, growth_interval=1)
  updates, state = tx.update({"w": jnp.float32(2.0**17 / 3)}, tx.init(PARAMS))
  assert (float(updates["w"]), float(state.scale)) == (float(jnp.float32(1 / 3)), 2.0**18)
  scaling = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1), period=1)
  assert float(scaling.adjust(jnp.asarray(True)).loss_scaling) == 65504
  # To ask it for bfloat16 by name changes nothing, and says nothing.
  mpx.set_half_precision_datatype("bfloat16")
  assert mpx.half_precision_datatype() == jnp.float16
  assert mpjax.get_policy("bf16").compute_dtype == jnp.bfloat16


def test_policies_of_numpy_dtypes_have_a_string():
  policy = jmp.Policy(*[np.dtype("float16")] * 3)
  with pytest.raises(KeyError):
    str(policy)
  assert mpjax.get_policy(str(mpjax.get_policy(policy))) == mpjax.get_policy(policy)
  # A Python number is a leaf here as it is for jax.numpy; jmp passes it by.
  assert isinstance(jmp.cast_to_half({"x": 1.0})["x"], float)
  assert not mpjax.all_finite({"x": float("inf")})


def test_apply_if_finite_gives_up_and_we_do_not():
  bad = {"w": jnp.asarray([jnp.nan, 1.0])}
  peer, ours = optax.apply_if_finite(optax.sgd(0.1), 2), mpjax.dynamic_loss_scale(optax.sgd(0.1))
  peer_state, state = peer.init(PARAMS), ours.init(PARAMS)
  for _ in range(4):
    theirs, peer_state = peer.update(bad, peer_state, PARAMS)
    updates, state = ours.update(bad, state, PARAMS)
  assert not mpjax.all_finite(theirs)
  assert not updates["w"].any()


def test_apply_if_finite_asks_the_incoming_gradients_alone():
  divides = optax.GradientTransformation(
    lambda params: (), lambda g, s, p=None: (jax.tree.map(jnp.divide, g, g), s)
  )
  tx = optax.apply_if_finite(divides, 5)
  updates, state = tx.update({"w": jnp.zeros(2)}, tx.init(PARAMS))
  assert np.isnan(updates["w"]).all()
  assert int(state.total_notfinite) == 0
  updates, _ = tx.update({"w": jnp.asarray([jnp.inf, 1.0])}, state)
  assert (updates["w"] == 0).all()


@pytest.mark.parametrize("scale", [2.0**15, jnp.asarray(2.0**15)], ids=["a number", "weakly typed"])
def test_jmp_divides_in_float16_only_while_its_scale_is_weakly_typed(scale):
  grads = {"w": jnp.full(2, 1e-3, jnp.float16)}
  exact = float(jnp.float16(1e-3)) / 2**15
  weak = jmp.DynamicLossScale(scale) if isinstance(scale, jax.Array) else jmp.StaticLossScale(scale)
  assert weak.unscale(grads)["w"].dtype == jnp.float16
  assert abs(float(weak.unscale(grads)["w"][0]) / exact - 1) > 0.5
  strong = (
    weak.adjust(jnp.asarray(True))
    if isinstance(scale, jax.Array)
    else jmp.StaticLossScale(jnp.float32(scale))
  )
  assert float(strong.unscale(grads)["w"][0]) == exact
  # Ours is float32 from the first step on.
  tx = SCALED(init_scale=2.0**15)
  updates, _ = tx.update(grads, tx.init(PARAMS))
  assert float(updates["w"][0]) == exact


def test_half_precision_parameters_with_wide_moments():
  """apply_if_finite has a conditional with branches of one dtype each; here the updates are selected."""
  params = {"w": jnp.ones(2, jnp.bfloat16)}
  inner = lambda: optax.adam(0.1, mu_dtype=jnp.float32)
  tx = mpjax.dynamic_loss_scale(inner())
  updates, _ = tx.update(params, tx.init(params), params)
  assert mpjax.all_finite(updates)
  guarded = optax.apply_if_finite(inner(), 2)
  with pytest.raises(TypeError):
    guarded.update(params, guarded.init(params), params)


def test_a_clip_before_the_check_hides_an_overflow():
  bad = {"w": jnp.asarray([jnp.inf, 1.0])}
  clipped, _ = optax.clip(1.0).update(bad, optax.EmptyState())
  assert mpjax.all_finite(clipped)  # so the check has to come first, as it does
  tx = mpjax.dynamic_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(0.1)))
  _, state = tx.update(bad, tx.init(PARAMS), PARAMS)
  assert not state.grads_finite


def test_float16_gradients_whose_norm_is_no_float16_are_clipped_right():
  grads = {"w": jnp.full(4, 300.0, jnp.float16)}
  clip = optax.clip_by_global_norm(1.0)
  peer, _ = clip.update(grads, clip.init(grads))
  assert not peer["w"].any()  # the norm is infinite in float16
  tx = mpjax.static_loss_scale(clip, 1.0)
  updates, _ = tx.update(grads, tx.init(grads))
  np.testing.assert_allclose(updates["w"], np.full(4, 0.5), rtol=1e-6)


def test_a_guard_round_adam_alone_lets_schedule_and_decay_go_on():
  bad = {"w": jnp.asarray([jnp.nan, 1.0])}
  tail = lambda: (
    optax.add_decayed_weights(1.0),
    optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0, 10)),
  )
  peer = optax.chain(optax.apply_if_finite(optax.scale_by_adam(), 5), *tail())
  updates, state = peer.update(bad, peer.init(PARAMS), PARAMS)
  assert updates["w"].any()
  assert int(state[2].count) == 1
  ours = mpjax.dynamic_loss_scale(optax.chain(optax.scale_by_adam(), *tail()))
  updates, state = ours.update(bad, ours.init(PARAMS), PARAMS)
  assert not updates["w"].any()
  assert int(state.inner_state[2].count) == 0


def test_a_nan_loss_with_finite_gradients_is_a_step():
  """Gradients decide; the loss is for the user to look at (trap 13)."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  state = tx.init(PARAMS)
  of = lambda p: p["w"].sum() + jax.lax.stop_gradient(jnp.nan)
  grads = jax.grad(lambda p: mpjax.scale_loss(of(p), state))(PARAMS)
  updates, state = tx.update(grads, state, PARAMS)
  assert state.grads_finite
  np.testing.assert_array_equal(updates["w"], [-1, -1])


def test_a_cotangent_that_overflows_in_float16_is_seen():
  """A scaled loss that float32 holds, whose first half-precision gradient does not (trap 14)."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  state = tx.init(PARAMS)
  of = lambda p: (p["w"].astype(jnp.float16) * 5).sum().astype(jnp.float32)
  grads = jax.grad(lambda p: mpjax.scale_loss(of(p), state))(PARAMS)
  _, state = tx.update(grads, state, PARAMS)
  assert not state.grads_finite
  assert float(state.scale) == 2.0**15


def test_a_gradient_penalty_unscales_inside_the_graph():
  """Double backward: the inner gradients are of the unscaled loss (trap 31)."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  state = tx.init(PARAMS)
  loss = lambda w: (w**3).sum()

  def penalised(w):
    return loss(w) + (jax.grad(loss)(w) ** 2).sum()

  grads = jax.grad(lambda p: mpjax.scale_loss(penalised(p["w"]), state))(PARAMS)
  updates, _ = tx.update(grads, state, PARAMS)
  np.testing.assert_allclose(updates["w"], -jax.grad(penalised)(PARAMS["w"]), rtol=1e-6)


def test_debug_nans_is_quiet_on_an_overflow_to_infinity():
  """What `jax_debug_nans` stops at is NaN: an overflow that is skipped passes it (trap 34)."""
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  with jax.debug_nans(True):
    updates, _ = jax.jit(tx.update)({"w": jnp.asarray([jnp.inf, 1.0])}, tx.init(PARAMS), PARAMS)
  assert not updates["w"].any()


def test_the_scale_and_what_is_inside_are_found_by_optax_itself():
  """One key of its own in the whole state, and monitors inside see unscaled updates (trap 26)."""
  seen = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u, updates))
  tx = mpjax.dynamic_loss_scale(optax.chain(seen, optax.ema(0.0), optax.adam(0.1)), init_scale=8.0)
  _, state = tx.update({"w": jnp.asarray([8.0, 16.0])}, tx.init(PARAMS), PARAMS)
  assert bool(optax.tree.get(state, "grads_finite"))
  np.testing.assert_array_equal(optax.tree.get(state, "ema")["w"], [1.0, 2.0])


def test_micro_batches_of_half_precision_are_added_in_float32():
  """4096 ones in bfloat16 stall at 256 (trap 30)."""
  stalled = jax.lax.scan(lambda c, x: (c + x, None), jnp.bfloat16(0), jnp.ones(4096, jnp.bfloat16))[0]
  assert float(stalled) == 256
  tx = mpjax.dynamic_loss_scale(
    optax.MultiSteps(optax.sgd(1.0), 512, use_grad_mean=False).gradient_transformation()
  )
  params = {"w": jnp.zeros((), jnp.float32)}

  def step(carry, _):
    params, state = carry
    updates, state = tx.update({"w": state.scale.astype(jnp.bfloat16)}, state, params)
    return (optax.apply_updates(params, updates), state), None

  (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=512)
  assert float(params["w"]) == -512


def test_two_losses_under_one_scale():
  """Both are multiplied by it, and their gradients added (trap 15)."""
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0))
  state = tx.init(PARAMS)
  of = lambda p: mpjax.scale_loss(p["w"].sum(), state) + mpjax.scale_loss((p["w"] ** 2).sum(), state)
  updates, _ = tx.update(jax.grad(of)(PARAMS), state, PARAMS)
  np.testing.assert_allclose(updates["w"], [-3.0, -5.0])
