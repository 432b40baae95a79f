"""Loss scaling beside other transforms of optax: what may not stand outside, and arguments that are gradients."""

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
SGD = optax.sgd(1.0)
SCALED = functools.partial(mpjax.dynamic_loss_scale, growth_interval=2)


def gradients(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: np.float32(rng.normal(size=p.shape) * scale), PARAMS)


def loss(params):
  return sum(jnp.sum(jnp.cosh(p)) for p in jax.tree.leaves(params))


def close(tree, expected):
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7), tree, expected)


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
