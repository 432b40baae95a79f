"""State that is no moment is kept as it is, whatever wraps it, and the moments beside it in few bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax
from mpjax._tree import named_leaves
from mpjax.optim import is_quantized

PARAMS = {"w": jax.random.normal(jax.random.key(0), (64, 64)), "b": jnp.zeros(64)}
multi = lambda inner: optax.MultiSteps(inner, 2).gradient_transformation()
jitted = lambda tx: optax.GradientTransformation(jax.jit(tx.init), tx.update)
CASES = {
  "schedule_free": (contrib.schedule_free_adamw(1e-2), {"z"}, {"nu"}),
  "mechanize": (contrib.mechanize(optax.adam(1e-2)), {"x0"}, {"mu", "nu"}),
  "prodigy": (contrib.prodigy(), {"params0"}, {"exp_avg", "exp_avg_sq", "grad_sum"}),
  "sam": (contrib.sam(optax.adam(1e-2), optax.sgd(0.1)), {"cache"}, {"mu", "nu"}),
  "MultiSteps": (multi(optax.adam(1e-2)), {"acc_grads"}, {"mu", "nu"}),
  "apply_every": (optax.chain(optax.apply_every(2), optax.adam(1e-2)), {"grad_acc"}, {"mu", "nu"}),
  "masked": (optax.masked(multi(optax.adam(1e-2)), {"w": True, "b": False}), {"acc_grads"}, {"mu", "nu"}),
  "both": (multi(contrib.schedule_free_adamw(1e-2)), {"acc_grads", "z"}, {"nu"}),
  "hyperparams": (
    optax.inject_hyperparams(lambda lr: contrib.mechanize(optax.adam(lr)))(1.0),
    {"x0"},
    {"mu", "nu"},
  ),
  "a jitted init": (jitted(contrib.schedule_free_adamw(1e-2)), {"z"}, {"nu"}),
}


def kept(state):
  """Returns the names of the fields whose leaf `w` is in few bytes, and of those where it is not."""
  of_w = [(path.split("/"), x) for path, x in named_leaves(state, is_quantized) if path.endswith("w")]
  names = lambda few: {parts[-2] for parts, x in of_w if is_quantized(x) == few}
  return names(True), names(False)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_moment_stays_as_it_is(name, dtype):
  inner, exact, moments = CASES[name]
  tx = mpjax.quantized_state(inner, dtype)
  state = tx.init(PARAMS)
  assert kept(state.inner_state) == (moments, exact)
  shapes = jax.eval_shape(tx.init, PARAMS)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  state = jax.jit(tx.update)(PARAMS, state, PARAMS)[1] if name != "a jitted init" else state
  assert kept(state.inner_state) == (moments, exact)


def test_accumulated_gradients_are_the_plain_ones():
  grads = [{k: jax.random.normal(jax.random.key(i), p.shape) for k, p in PARAMS.items()} for i in range(4)]
  plain, few = multi(optax.sgd(0.1)), mpjax.quantized_state(multi(optax.sgd(0.1)))
  states = [plain.init(PARAMS), few.init(PARAMS)]
  for each in grads:
    (a, states[0]), (b, states[1]) = (
      tx.update(each, s, PARAMS) for tx, s in zip((plain, few), states, strict=True)
    )
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_state_of_multi_steps_is_converted_alike():
  inner = multi(optax.adam(1e-2))
  stored = mpjax.quantize_state(inner.init(PARAMS), PARAMS)
  assert jax.tree.structure(stored) == jax.tree.structure(mpjax.quantized_state(inner).init(PARAMS))
