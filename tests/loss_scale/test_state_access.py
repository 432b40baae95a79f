"""The loss scale in an optimiser's state: found, used, logged, missing without harm; what is not finite."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
SCALED = lambda scale=2.0**10: mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=scale)
LINEAR = functools.partial(nnx.Linear, 2, 2, rngs=nnx.Rngs(0))
IN_NNX = lambda tx: nnx.Optimizer(LINEAR(), tx, wrt=nnx.Param)
GROUPS = {"a": "x", "b": "y"}
NESTINGS = {
  "bare": SCALED(),
  "chain": optax.chain(optax.identity(), SCALED()),
  "masked": optax.masked(SCALED(), {"a": True, "b": False}),
  "groups": optax.partition({"x": SCALED(), "y": optax.sgd(0.1)}, GROUPS),
  "multi-steps": optax.MultiSteps(SCALED(), 2).gradient_transformation(),
  "hyperparameters": optax.inject_hyperparams(lambda learning_rate: SCALED())(0.1),
}


def test_the_scale_is_found_wherever_it_is_nested():
  states = {name: tx.init(PARAMS) for name, tx in NESTINGS.items()} | {"nnx.Optimizer": IN_NNX(SCALED())}
  for name, state in states.items():
    assert isinstance(mpjax.get_loss_scale(state), mpjax.LossScaleState), name
    assert float(mpjax.get_loss_scale(state).scale) == 2.0**10, name
    assert float(mpjax.scale_loss(np.float32(2), state)) == 2.0**11, name


def test_of_several_scales_one_must_be_named():
  state = optax.partition({"x": SCALED(4.0), "y": SCALED(8.0)}, GROUPS).init(PARAMS)
  fun = lambda params: params["a"].sum()
  for use in (
    lambda **path: mpjax.get_loss_scale(state, **path).scale,
    lambda **path: mpjax.scale_loss(1.0, state, **path),
    lambda **path: mpjax.value_and_grad(fun, state, **path)(PARAMS)[1]["a"][0],
    lambda **path: mpjax.loss_scale.gradient_norm({"a": np.float32(16)}, state, **path),
    lambda **path: mpjax.keep_if_finite(state, 1.0, 2.0, **path) * 8,
  ):
    with pytest.raises(ValueError, match=r"2 loss scales.*'x'.*'y'.*path="):
      use()
    with pytest.raises(ValueError, match="no loss scale at path='z'"):
      use(path="z")
    assert use(path="'y'") in (8, 2), use
  with pytest.raises(ValueError, match=r"2 loss scales.*inner_state"):  # one inside another
    mpjax.get_loss_scale(mpjax.dynamic_loss_scale(SCALED()).init(PARAMS))
  for state in ((), optax.adam(0.1).init(PARAMS), PARAMS):
    with pytest.raises(ValueError, match=r"no loss scale.*mpjax\.dynamic_loss_scale"):
      mpjax.get_loss_scale(state)


def test_losses_are_scaled_in_float32_and_only_cast_without_a_scale():
  state, plain = mpjax.dynamic_loss_scale(optax.sgd(1.0)).init(PARAMS), optax.adam(0.1).init(PARAMS)
  for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32):
    out = mpjax.scale_loss(np.asarray(3, dtype), state)
    assert (out.dtype, float(out)) == (jnp.float32, 3 * 65536.0), dtype  # itself not finite in float16
    out = mpjax.scale_loss(np.asarray(3, dtype), plain)
    assert (out.dtype, float(out)) == (jnp.float32, 3), dtype
  average = mpjax.Average(6.0, 2)
  assert [float(mpjax.scale_loss(average, s)) for s in (state, plain)] == [3 * 65536.0, 3]


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_the_norm_for_a_log_is_of_unscaled_gradients_of_modules_too(policy):
  optimizer = IN_NNX(mpjax.with_loss_scaling(optax.sgd(0.1), policy))
  scale = 1 if policy == "fp32" else mpjax.get_loss_scale(optimizer).scale
  grads = jax.tree.map(lambda x: (x * 0 + 3) * scale, nnx.state(LINEAR(), nnx.Param))  # six entries
  assert float(mpjax.loss_scale.gradient_norm(grads, optimizer)) == pytest.approx(3 * 6**0.5)
  # Leaves that are overwritten do not count.
  grads = {
    "w": np.full(4, 2.0, np.float32) * scale,
    "_overwrite_with_gradient": {"scale": np.float32(np.inf)},
  }
  assert float(mpjax.loss_scale.gradient_norm(grads, optimizer)) == 4


# What is no optimiser's state, and how an error shows it.
NO_STATES = [
  ("fp16", "'fp16'"),
  (mpjax.get_policy("fp16"), "a Policy"),
  ({"base": "fp16"}, "a dict"),
  (jnp.float32(2.0**16), "an array, like parameters"),
  (PARAMS, "a dict, like parameters"),
  (LINEAR(), "a Linear.*or the nnx.Optimizer"),
  (nnx.state(LINEAR()), "a State"),
  (eqx.nn.Linear(2, 2, key=jax.random.key(0)), "a Linear"),
  (optax.sgd(0.1), "an optimiser: pass its state"),
]
CALLS = (
  lambda state: mpjax.value_and_grad(sum, state),
  lambda state: mpjax.scale_loss(1.0, state),
  lambda state: mpjax.keep_if_finite(state, 1.0, 2.0),
  lambda state: mpjax.loss_scale.gradient_norm(PARAMS, state),
)


def test_what_is_no_optimisers_state_is_a_type_error_that_says_what_to_pass():
  for call in CALLS:
    for value, shown in NO_STATES:
      with pytest.raises(TypeError, match=f"opt_state is {shown}") as error:
        call(value)
      assert "opt_state = tx.init(params)" in str(error.value), shown
      assert len(str(error.value)) < 300, shown


def test_all_finite():
  nan, inf = float("nan"), float("inf")
  finite = [{}, None, [1.0, 2], [np.ones(3), jnp.ones(2)], np.zeros((0, 4)), np.zeros(2, jax.dtypes.float0)]
  finite.append({"a": np.arange(3), "b": np.ones(2, bool), "k": jax.random.key(0)})
  not_finite = [nan, [1.0, np.asarray([1.0, nan])], np.asarray(1 + 1j * inf)]
  not_finite += [np.float16(inf), np.asarray(-inf, jnp.bfloat16)]
  found = jax.jit(lambda: [mpjax.all_finite(tree) for tree in finite + not_finite])()
  assert [bool(out) for out in found] == [True] * len(finite) + [False] * len(not_finite)
  assert {(out.shape, out.dtype) for out in found} == {((), np.dtype(bool))}


def test_metrics_are_the_state_ready_for_a_logger():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2)
  bad = PARAMS | {"a": np.float32([np.nan, 1])}
  of_step = lambda state: mpjax.loss_scale.loss_scale_metrics(tx.update(bad, state, PARAMS)[1])
  numbers = {name: value.item() for name, value in jax.jit(of_step)(tx.init(PARAMS)).items()}
  assert numbers == {
    "loss_scale": 2.0**15,
    "good_steps": 0,
    "skipped_steps": 1,
    "consecutive_skips": 1,
    "grads_finite": False,
    "updates_finite": True,
  }
  json.dumps(numbers)
  assert mpjax.loss_scale.loss_scale_metrics(optax.adam(0.1).init(PARAMS)) == {}
  groups = optax.partition({"x": SCALED(4.0), "y": SCALED(8.0)}, GROUPS).init(PARAMS)
  metrics = mpjax.loss_scale.loss_scale_metrics(groups)
  scales = {name: float(value) for name, value in metrics.items() if name.endswith("/loss_scale")}
  assert {name.split("'")[1]: scale for name, scale in scales.items()} == {"x": 4.0, "y": 8.0}


def test_nonfinite_leaves_on_demand():
  w = np.asarray([[np.nan, np.inf, 1], [np.inf, -np.inf, 2]], np.float32)
  tree = {"dense": {"w": w, "b": np.ones(3)}, "c": np.complex64([complex(0, np.inf), 1]), "i": np.arange(3)}
  rows = mpjax.loss_scale.nonfinite_leaves(tree)
  expected = {"dense/w": "1 NaN, 2 +inf, 1 -inf of 6", "c": "1 +inf of 2"}
  assert {path: str(row) for path, row in rows.items()} == expected
  assert mpjax.loss_scale.nonfinite_leaves(PARAMS) == {}
