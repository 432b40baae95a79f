"""Loss scaling in every optax composition: a skipped step leaves no trace, wherever the scale stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PARAMS = {
  "w": np.asarray([[0.5, -1.25], [2.0, 0.125]], np.float32),
  "b": np.asarray([0.1, -0.2], np.float32),
}
STEPS = [True, False, True, True, False, False, True]
ADAM, SGD = optax.adam(0.1), optax.sgd(1.0)
SCALED = functools.partial(mpjax.dynamic_loss_scale, growth_interval=2)


def gradients(i, finite=True, scale=1.0):
  """Gradients of step `i`; not finite: one element of one leaf is an infinity or NaN."""
  rng = np.random.default_rng(i)
  grads = jax.tree.map(lambda p: np.float32(rng.normal(size=p.shape) * scale), PARAMS)
  if not finite:
    grads["w"][i % 2, 0] = [np.inf, -np.inf, np.nan][i % 3]
  return grads


def loss(params):
  return sum(jnp.sum(jnp.cosh(p)) for p in jax.tree.leaves(params))


def numbers(tree):
  is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


def same_bits(tree, expected):
  described = lambda tree: [(leaf.dtype, leaf.tobytes()) for leaf in numbers(tree)]
  assert described(tree) == described(expected)


def close(tree, expected):
  for a, b in zip(numbers(tree), numbers(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def run_both(plain, wrapped, extra, scaler=lambda state: state):
  """Runs `wrapped` on all steps and `plain` on the finite ones; returns parameters and states of both."""

  def step(tx, params, state, grads):
    arguments = {**extra, "grad": grads} if "grad" in extra else extra
    updates, state = tx.update(grads, state, params, **arguments)
    return mpjax.apply_updates(params, updates), state, updates

  scaled = lambda grads, state: jax.tree.map(lambda g: g * scaler(state).scale, grads)
  ours = jax.jit(lambda params, state, grads: step(wrapped, params, state, scaled(grads, state)))
  theirs = jax.jit(functools.partial(step, optax.with_extra_args_support(plain)))
  params, state = PARAMS, wrapped.init(PARAMS)
  expected, plain_state = PARAMS, plain.init(PARAMS)
  for i, finite in enumerate(STEPS):
    before = params, scaler(state).inner_state
    params, state, updates = ours(params, state, gradients(i, finite))
    assert bool(scaler(state).grads_finite) == finite
    if finite:
      expected, plain_state, _ = theirs(expected, plain_state, gradients(i))
    else:
      assert not any(leaf.any() for leaf in numbers(updates))
      same_bits((params, scaler(state).inner_state), before)
  # Some transforms of optax start from weakly typed states, which jit traces twice, with us or without.
  assert ours._cache_size() <= max(1, theirs._cache_size())
  close(params, expected)
  return state, plain_state


# Name to (what makes the transform, arguments of its update).
SGD_01 = optax.sgd(0.1)
DECAY = optax.cosine_decay_schedule(0.1, 20)
INSIDE = {
  "adamw with a schedule": (lambda: optax.adamw(DECAY, weight_decay=0.1), {}),
  "add_noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), SGD_01), {}),
  "masked": (lambda: optax.masked(ADAM, {"w": True, "b": False}), {}),
  "MultiSteps": (lambda: optax.MultiSteps(ADAM, 2).gradient_transformation(), {}),
  "apply_if_finite": (lambda: optax.apply_if_finite(ADAM, 3), {}),
  "sam, opaque": (
    lambda: optax.contrib.sam(SGD_01, optax.sgd(0.05), opaque_mode=True),
    {"grad_fn": lambda params, i: jax.grad(loss)(params)},
  ),
  "reduce_on_plateau": (
    lambda: optax.chain(SGD_01, optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
    {"value": 1.0},
  ),
  "backtracking linesearch": (
    lambda: optax.chain(SGD_01, optax.scale_by_backtracking_linesearch(5)),
    {"value": 3.0, "grad": None, "value_fn": loss},
  ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_parameters_and_inner_state_are_those_of_the_finite_steps_alone(name):
  make, extra = INSIDE[name]
  state, plain_state = run_both(make(), SCALED(make()), extra)
  close(state.inner_state, plain_state)
  assert float(state.scale) == 2.0**14


def test_multi_steps_outside_is_refused_by_whoever_sees_the_transform():
  multi = optax.MultiSteps(optax.chain(SCALED(SGD)), 2)
  tx = optax.masked(multi.gradient_transformation(), True)
  assert float(mpjax.get_loss_scale(tx.init(PARAMS)).scale) == 2.0**16
  step = mpjax.make_train_step(lambda params, batch: loss(params), tx, "fp32")
  for see in (
    lambda: mpjax.loss_scale.check_loss_scaling(tx, PARAMS),
    lambda: step.init(PARAMS),
    lambda: jax.eval_shape(step.tx.init, PARAMS),
  ):
    with pytest.raises(ValueError, match=r"MultiSteps is outside.*put it inside.*accumulate="):
      see()


def test_the_argument_grad_is_unscaled_and_no_other():
  def update(updates, state, params=None, *, value, grad, other):
    return {"updates": updates, "value": value, "grad": grad, "other": other}, state

  tx = SCALED(optax.GradientTransformationExtraArgs(lambda params: (), update))
  grads, more = (gradients(i, scale=2.0**16) for i in range(2))
  run = jax.jit(tx.update)
  seen, _ = run(grads, tx.init(PARAMS), PARAMS, value=np.float32(2.5), grad=more, other=grads)
  close((seen["updates"], seen["grad"], seen["other"]), (gradients(0), gradients(1), grads))
  assert seen["value"] == 2.5
