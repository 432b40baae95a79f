"""Loss scaling of gradients of every kind, and of what is no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

OWG = "_overwrite_with_gradient"
F32 = np.float32


def updated(tx, grads, state=None, params=None):
  """The updates and the state of a jitted step."""
  return jax.jit(tx.update)(grads, tx.init(grads) if state is None else state, params)


def test_leaves_of_every_kind_are_judged_and_passed_on():
  grads = {
    "f16": np.ones((2,), np.float16),
    "bf16": np.ones((2,), jnp.bfloat16),
    "f32": np.ones((), F32),
    "c64": np.ones((2,), np.complex64),
    "none": None,
    "masked": optax.MaskedNode(),
    "empty": np.zeros((0, 3), F32),
    "nothing": {},
  }
  tx = mpjax.dynamic_loss_scale(optax.identity(), init_scale=4.0)
  whole = np.zeros((3,), jax.dtypes.float0)
  # What is no array is closed over.
  update = jax.jit(lambda grads, state: tx.update({**grads, "int": whole}, state)[::-1])
  for bad in (None, "f16", "bf16", "f32", "c64"):
    given = dict(grads)
    if bad:
      given[bad] = np.full_like(grads[bad], complex(0, np.inf) if bad == "c64" else np.nan)
    state, updates = update(given, tx.init(given))
    assert bool(state.grads_finite) == (bad is None), bad
    assert jax.tree.structure(updates) == jax.tree.structure({**grads, "int": whole})
    assert all((updates[k] == (0.0 if bad else 0.25)).all() for k in ("f16", "bf16", "f32", "c64")), bad
    assert updates["f16"].dtype == updates["bf16"].dtype == jnp.float32
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  updates, state = updated(tx, {})  # an empty tree is finite
  assert (updates, bool(state.grads_finite)) == ({}, True)


def test_unscaling_by_powers_of_two_is_exact_for_every_float16():
  every = np.arange(2**16, dtype=np.uint16).view(np.float16)
  every = every[np.isfinite(every)]
  updates, _ = updated(mpjax.static_loss_scale(optax.identity(), 2.0**20), {"g": every})
  assert updates["g"].dtype == np.float32  # widened before they are divided
  np.testing.assert_array_equal(np.float64(updates["g"]), np.float64(every) / 2.0**20)


def test_a_static_scale_skips_only_if_told_to():
  for skip in (True, False):
    tx = mpjax.static_loss_scale(optax.sgd(1.0), 8.0, skip_nonfinite=skip)
    updates, state = updated(tx, {"w": np.asarray([8.0, 16.0], F32)})
    np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])
    updates, state = updated(tx, {"w": np.asarray([8.0, np.nan], F32)}, state)
    assert (float(state.scale), int(state.skipped_steps), bool(state.grads_finite)) == (8, 1, False)
    assert np.isfinite(updates["w"]).all() == skip


# FP8 scales and amax histories: their "gradient" is their next value.
SHOWN = {"params": {"w": np.ones(2, F32)}, OWG: {"scale": F32(3), "history": np.zeros(2, F32)}}
NEXT = {"params": {"w": np.full(2, 8, F32)}, OWG: {"scale": F32(5), "history": np.full(2, 7, F32)}}


def test_overwritten_leaves_are_replaced_kept_on_a_skip_and_never_unscaled_clipped_or_judged():
  inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
  tx = mpjax.dynamic_loss_scale(inner, init_scale=8.0)

  @jax.jit
  def step(grads):
    updates, state = tx.update(grads, tx.init(SHOWN), SHOWN)
    return mpjax.apply_updates(SHOWN, updates), state

  new, state = step(NEXT)
  assert float(new[OWG]["scale"]) == 5
  np.testing.assert_array_equal(new[OWG]["history"], [7, 7])
  assert len(jax.tree.leaves(state.inner_state)) == 3  # count, and moments of w alone
  # The first step of Adam is one of the learning rate, here with the decay, whatever the gradient.
  np.testing.assert_allclose(new["params"]["w"], 1 - 0.1 - 0.1 * 1e-4, rtol=1e-6)
  clipped = 0.1 * 0.1 / 2**0.5  # 1 - b1 of the gradient (1, 1), clipped to a norm of 0.1
  np.testing.assert_allclose(state.inner_state[1][0].mu["params"]["w"], clipped, rtol=1e-5)
  new, state = step({**NEXT, "params": {"w": np.asarray([np.inf, 1.0], F32)}})
  jax.tree.map(np.testing.assert_array_equal, new, SHOWN)
  assert int(state.skipped_steps) == 1
  new, state = step({**NEXT, OWG: {**NEXT[OWG], "scale": F32(np.inf)}})
  assert bool(state.grads_finite)
  assert float(new[OWG]["scale"]) == np.inf
  plain = mpjax.dynamic_loss_scale(optax.sgd(0.1))
  with pytest.raises(ValueError, match="without params"):
    jax.eval_shape(plain.update, NEXT, plain.init(SHOWN))


def test_a_step_is_skipped_if_its_unscaled_gradients_are_not_finite():
  """Below a scale of 1, a finite gradient of the scaled loss may be infinite when the scale is taken off."""
  for lowest in (2.0**-10, 1.0):
    tx = mpjax.dynamic_loss_scale(optax.adam(1.0), min_scale=lowest)
    update = jax.jit(tx.update)
    for scale, value, finite in (
      (2.0**-10, 60_000.0, True),
      (2.0**-10, 1e38, False),
      (2.0**16, 1e20, True),
      (2.0**16, np.inf, False),
      (2.0**16, np.nan, False),
      (0.0, 0.0, False),
      (np.nan, 0.0, False),
    ):
      if scale >= lowest or not scale > 0:
        grads = np.asarray([1.0, value], F32)
        updates, new = update(grads, tx.init(grads)._replace(scale=jnp.float32(scale)), grads)
        assert bool(new.grads_finite) == finite, (scale, value)
        assert np.asarray(updates).any() == finite, (scale, value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new.inner_state)), (scale, value)
        assert int(new.inner_state[0].count) == finite, (scale, value)


def test_what_a_step_would_make_not_finite_is_not_made_and_is_no_fault_of_the_scale():
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0)
  step = jax.jit(lambda params, grads, state, finite: tx.update(grads, state, params, state_finite=finite))
  for params, grads, finite, taken in (
    ([1.0, -np.inf], [1.0, 0.0], True, True),  # as in a mask
    ([3e38, 1.0], [-3e38, 0.0], True, False),
    ([1.0, 1.0], [1.0, 0.0], False, False),
  ):
    before = tx.init(F32(params))._replace(good_steps=jnp.int32(5))
    updates, state = step(F32(params), F32(grads), before, finite)
    assert (bool(state.grads_finite), bool(state.updates_finite), float(state.scale)) == (True, taken, 2)
    assert (int(state.good_steps), int(state.skipped_steps)) == (5 + taken, not taken)
    assert np.asarray(updates).any() == taken


def test_the_argument_grad_is_unscaled_and_no_other():
  def update(updates, state, params=None, *, value, grad, other):
    return {"updates": updates, "value": value, "grad": grad, "other": other}, state

  tx = mpjax.dynamic_loss_scale(optax.GradientTransformationExtraArgs(lambda params: (), update))
  grads = F32([2.0**16, 3 * 2.0**16])
  seen, _ = jax.jit(tx.update)(grads, tx.init(grads), grads, value=F32(2.5), grad=2 * grads, other=grads)
  for name, expected in {"updates": [1, 3], "value": 2.5, "grad": [2, 6], "other": grads}.items():
    np.testing.assert_array_equal(seen[name], expected)
