"""`get_loss_scale`, `scale_loss` and `all_finite`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax

PARAMS = {"a": jnp.ones(2), "b": jnp.ones(3)}
SCALED = lambda scale=2.0**10: mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=scale)
NESTINGS = {
  "bare": lambda: SCALED(),
  "chain": lambda: optax.chain(optax.identity(), SCALED()),
  "masked": lambda: optax.masked(SCALED(), {"a": True, "b": False}),
  "groups": lambda: optax.partition({"x": SCALED(), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
  "multi-steps outside": lambda: optax.MultiSteps(SCALED(), 2).gradient_transformation(),
  "multi-steps inside": lambda: mpjax.dynamic_loss_scale(
    optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), init_scale=2.0**10
  ),
  "hyperparameters": lambda: optax.inject_hyperparams(
    lambda learning_rate: mpjax.dynamic_loss_scale(optax.adam(learning_rate), init_scale=2.0**10)
  )(0.1),
  "static": lambda: mpjax.static_loss_scale(optax.adam(0.1), 2.0**10),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_the_scale_is_found_wherever_it_is_nested(name):
  state = NESTINGS[name]().init(PARAMS)
  assert float(mpjax.get_loss_scale(state).scale) == 2.0**10
  assert isinstance(mpjax.get_loss_scale(state), mpjax.LossScaleState)
  assert float(jax.jit(lambda s: mpjax.scale_loss(jnp.float32(2), s))(state)) == 2.0**11


def test_the_scale_is_found_in_flax_states():
  state = TrainState.create(apply_fn=None, params=PARAMS, tx=SCALED())
  assert float(mpjax.get_loss_scale(state.opt_state).scale) == 2.0**10
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, SCALED(), wrt=nnx.Param)
  assert float(mpjax.get_loss_scale(optimizer).scale) == 2.0**10
  optimizer.update(model, nnx.state(jax.tree.map(lambda x: x * jnp.inf, model), nnx.Param))
  assert float(mpjax.get_loss_scale(optimizer).scale) == 2.0**9
  assert float(mpjax.scale_loss(jnp.float16(1), optimizer)) == 2.0**9


@pytest.mark.parametrize("state", [(), optax.adam(0.1).init(PARAMS), {"x": jnp.ones(2)}])
def test_no_scale_is_an_error_that_says_what_to_do(state):
  with pytest.raises(ValueError, match=r"no loss scale.*mpjax\.dynamic_loss_scale"):
    mpjax.get_loss_scale(state)


def test_of_several_scales_one_must_be_named():
  groups = optax.partition({"x": SCALED(4.0), "y": SCALED(8.0)}, {"a": "x", "b": "y"})
  state = groups.init(PARAMS)
  with pytest.raises(ValueError, match=r"2 loss scales.*'x'.*'y'.*path="):
    mpjax.get_loss_scale(state)
  assert float(mpjax.get_loss_scale(state, path="'x'").scale) == 4
  assert float(mpjax.scale_loss(1.0, state, path="'y'")) == 8
  with pytest.raises(ValueError, match="no loss scale at path='z'"):
    mpjax.get_loss_scale(state, path="z")


def test_a_scale_inside_a_scale_counts_as_two():
  state = mpjax.dynamic_loss_scale(SCALED()).init(PARAMS)
  with pytest.raises(ValueError, match=r"2 loss scales.*inner_state"):
    mpjax.get_loss_scale(state)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32])
def test_losses_are_scaled_in_float32(dtype):
  state = mpjax.dynamic_loss_scale(optax.sgd(1.0)).init(PARAMS)
  out = mpjax.scale_loss(jnp.asarray(3, dtype), state)
  # 65536 itself is not finite in float16.
  assert (out.dtype, float(out)) == (jnp.float32, 3 * 65536.0)


@pytest.mark.parametrize(
  ("tree", "finite"),
  [
    ({}, True),
    (None, True),
    ({"a": jnp.arange(3), "b": jnp.ones(2, bool), "k": jax.random.key(0)}, True),
    ([jnp.ones(2), np.ones(3)], True),
    ([jnp.ones(2), np.asarray([1.0, np.nan])], False),
    ([jnp.asarray(jnp.inf, jnp.float16)], False),
    ([jnp.asarray(-jnp.inf, jnp.bfloat16)], False),
    ([jnp.asarray(1 + 1j * jnp.inf)], False),
    ([jnp.zeros((0, 4))], True),
    ([1.0, 2], True),
    ([float("nan")], False),
    ([np.zeros((2,), jax.dtypes.float0)], True),
  ],
)
def test_all_finite(tree, finite):
  out = mpjax.all_finite(tree)
  assert (out.shape, out.dtype, bool(out)) == ((), jnp.bool_, finite)
