"""Loss scaling of gradients of every kind, and of what is no gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops

import mpjax

OWG = "_overwrite_with_gradient"


@pytest.mark.parametrize("bad", [None, "f16", "bf16", "f32", "c64"])
def test_leaves_of_every_kind_are_judged_and_passed_on(bad):
  grads = {
    "f16": jnp.ones((2,), jnp.float16),
    "bf16": jnp.ones((2,), jnp.bfloat16),
    "f32": jnp.ones((), jnp.float32),
    "c64": jnp.ones((2,), jnp.complex64),
    "int": np.zeros((3,), jax.dtypes.float0),
    "none": None,
    "masked": optax.MaskedNode(),
    "empty": jnp.zeros((0, 3)),
    "nothing": {},
  }
  if bad:
    grads[bad] = grads[bad] * (jnp.nan if bad != "c64" else complex(0, np.inf))
  tx = mpjax.dynamic_loss_scale(optax.identity(), init_scale=4.0)
  updates, state = tx.update(grads, tx.init(grads))
  assert bool(state.grads_finite) == (bad is None)
  assert jax.tree.structure(updates) == jax.tree.structure(grads)
  value = 0.0 if bad else 0.25
  assert all((updates[k] == value).all() for k in ("f16", "bf16", "f32", "c64"))
  assert updates["int"].dtype == jax.dtypes.float0


def test_an_empty_tree_is_finite():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  updates, state = tx.update({}, tx.init({}))
  assert updates == {}
  assert bool(state.grads_finite)


def test_integer_parameters_of_allow_int():
  params = {"w": jnp.asarray([1.0, 2.0]), "index": jnp.asarray([0, 1])}
  tx = mpjax.dynamic_loss_scale(optax.masked(optax.adam(0.1), {"w": True, "index": False}))
  state = tx.init(params)
  of = lambda p: mpjax.scale_loss((p["w"][p["index"]] ** 2).sum(), state)
  updates, state = tx.update(jax.grad(of, allow_int=True)(params), state, params)
  np.testing.assert_allclose(updates["w"], [-0.1, -0.1], rtol=1e-5)
  assert updates["index"].dtype == jax.dtypes.float0


def test_float64_gradients_are_unscaled_in_float64():
  with jax.enable_x64(True):
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
    grads = {"g": jnp.asarray([1 / 3, 1e-300])}
    state = tx.init(grads)
    updates, new = tx.update(jax.tree.map(lambda g: g * 2.0**16, grads), state)
    assert updates["g"].dtype == new.inner_state[0].mu["g"].dtype == jnp.float64
    np.testing.assert_array_equal(new.inner_state[0].mu["g"], grads["g"] * np.float64(1 - 0.9))
    assert new.scale.dtype == jnp.float32
    updates, new = tx.update({"g": jnp.asarray([1.0, jnp.inf])}, new)
    assert not new.grads_finite


def test_float16_gradients_are_widened_before_they_are_unscaled():
  tx = mpjax.dynamic_loss_scale(optax.identity(), init_scale=2.0**16)
  grads = {"g": jnp.asarray(1e-8 * 2**16, jnp.float16)}
  updates, _ = tx.update(grads, tx.init(grads))
  assert updates["g"].dtype == jnp.float32
  np.testing.assert_allclose(updates["g"], 1e-8, rtol=1e-3)
  # jmp divides in float16, where 1e-8 is zero.
  assert jmp.StaticLossScale(jnp.float16(2**15)).unscale(jnp.float16(1e-8 * 2**15)) == 0


def test_unscaling_by_powers_of_two_is_exact_for_every_float16():
  every = jnp.arange(2**16, dtype=jnp.uint16).view(jnp.float16)
  every = every[jnp.isfinite(every)]
  tx = mpjax.static_loss_scale(optax.identity(), 2.0**20)
  updates, _ = jax.jit(tx.update)({"g": every}, tx.init({"g": every}))
  np.testing.assert_array_equal(np.float64(updates["g"]), np.float64(every) / 2.0**20)


def test_a_scale_below_one_catches_what_overflows_only_when_unscaled():
  tx = mpjax.static_loss_scale(optax.identity(), 2.0**-120)
  grads = {"g": jnp.asarray(60_000.0)}
  updates, state = tx.update(grads, tx.init(grads))
  assert not state.grads_finite
  assert float(updates["g"]) == 0


@pytest.mark.parametrize("skip", [True, False])
def test_static_scale(skip):
  params = {"w": jnp.asarray([1.0, 2.0])}
  tx = mpjax.static_loss_scale(optax.sgd(1.0), 8.0, skip_nonfinite=skip)
  updates, state = tx.update({"w": jnp.asarray([8.0, 16.0])}, tx.init(params), params)
  np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])
  updates, state = tx.update({"w": jnp.asarray([8.0, jnp.nan])}, state, params)
  assert float(state.scale) == 8
  assert (int(state.skipped_steps), bool(state.grads_finite)) == (1, False)
  assert bool(mpjax.all_finite(updates)) == skip


def test_half_precision_parameters_keep_the_dtypes_of_the_state():
  params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))

  def step(carry, i):
    params, state = carry
    grads = jax.tree.map(lambda p: (p * state.scale).astype(p.dtype), params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  (new, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(3))
  assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, tx.init(params))
  assert new["w"].dtype == jnp.bfloat16


class TestOverwrittenLeaves:
  """FP8 scales and amax histories: their "gradient" is their next value."""

  def setup_method(self):
    self.params = {"params": {"w": jnp.ones(2)}, OWG: {"scale": jnp.float32(3), "history": jnp.zeros(2)}}
    self.grads = {
      "params": {"w": jnp.full(2, 8.0)},
      OWG: {"scale": jnp.float32(5), "history": jnp.full(2, 7.0)},
    }

  def step(self, grads, state=None):
    tx = mpjax.dynamic_loss_scale(
      optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)), init_scale=8.0
    )
    updates, state = jax.jit(tx.update)(grads, state or tx.init(self.params), self.params)
    return mpjax.apply_updates(self.params, updates), state

  def test_they_are_replaced_and_neither_unscaled_nor_clipped(self):
    new, state = self.step(self.grads)
    assert jax.tree.map(float, new[OWG]["scale"]) == 5
    np.testing.assert_array_equal(new[OWG]["history"], [7, 7])
    assert len(jax.tree.leaves(state.inner_state)) == 3  # count, and moments of w alone
    alone = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    weights = {"w": self.params["params"]["w"]}
    updates, _ = alone.update({"w": jnp.ones(2)}, alone.init(weights), weights)
    np.testing.assert_allclose(new["params"]["w"], 1 + updates["w"], rtol=1e-6)

  def test_they_keep_their_value_on_a_skipped_step(self):
    bad = {**self.grads, "params": {"w": jnp.asarray([jnp.inf, 1.0])}}
    new, state = self.step(bad)
    jax.tree.map(np.testing.assert_array_equal, new, self.params)
    assert int(state.skipped_steps) == 1

  def test_they_are_not_judged(self):
    new, state = self.step({**self.grads, OWG: {"scale": jnp.float32(jnp.inf), "history": jnp.full(2, 7.0)}})
    assert bool(state.grads_finite)
    assert float(new[OWG]["scale"]) == np.inf

  def test_parameters_are_needed(self):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match="without params"):
      tx.update(self.grads, tx.init(self.params))

  def test_a_layer_of_flax(self):
    model = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = jax.random.normal(jax.random.key(0), (16, 16))
    variables = model.init(jax.random.key(1), x)
    step = mpjax.make_train_step(
      lambda v, x: jnp.mean((model.apply(v, x) - 1) ** 2),
      optax.adam(0.01),
      {"base": "fp32", "loss_scaling": {"init_scale": 2.0**10}},
      donate=False,
    )
    state = step.init(variables)
    first, _ = step(state, x)
    amax = first.params[OWG]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    np.testing.assert_allclose(amax.max(), jnp.abs(x).max(), rtol=1e-6)
    bad, metrics = step(first, x * jnp.nan)
    assert not metrics["grads_finite"]
    jax.tree.map(np.testing.assert_array_equal, bad.params, first.params)

  @pytest.mark.parametrize(
    "policy", ["fp32", "bf16", {"base": "fp16", "loss_scaling": 8}], ids=["fp32", "bf16", "fp16"]
  )
  @pytest.mark.parametrize("accumulate", [1, 2])
  def test_a_training_step_of_any_policy_overwrites_them(self, policy, accumulate):
    """Their values are theirs: not cast, not unscaled, not averaged but merged by maximum."""

    @jax.custom_vjp
    def remember(x, amax):
      return x

    # Of this, float16 would make an infinity.
    remember.defvjp(
      lambda x, amax: (x, x), lambda x, g: (g, 1e5 * jnp.abs(x).max().astype(jnp.float32).reshape(1))
    )
    params = {"params": {"w": jnp.ones((4, 4))}, OWG: {"amax": jnp.full((1,), 1e5)}}
    loss = lambda p, x: jnp.mean(remember(x @ p["params"]["w"], p[OWG]["amax"]).astype(jnp.float32) ** 2)
    step = mpjax.make_train_step(loss, optax.adam(1e-2), policy, accumulate=accumulate, donate=False)
    state = step.init(params)
    x = jnp.asarray([[1.0] * 4, [2.0] * 4])
    new, _ = step(state, x)
    np.testing.assert_allclose(new.params[OWG]["amax"], [8e5], rtol=1e-6)
    np.testing.assert_allclose(new.params["params"]["w"], np.full((4, 4), 0.99), rtol=1e-3)
    assert new.params[OWG]["amax"].dtype == jnp.float32
    np.testing.assert_allclose(step.gradients(state, x)[1][OWG]["amax"], [8e5], rtol=1e-6)

  def test_beside_integers_and_as_extra_arguments(self):
    params = {**self.params, "i": jnp.arange(3)}
    grads = {**self.grads, "i": np.zeros(3, jax.dtypes.float0)}
    inner = optax.masked(
      optax.sgd(0.1), lambda p: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), p)
    )
    updates, _ = mpjax.dynamic_loss_scale(inner).update(
      grads, mpjax.dynamic_loss_scale(inner).init(params), params
    )
    assert float(updates[OWG]["scale"]) == 5
    seen = {}

    def update(updates, state, params=None, *, grad):
      seen["same"] = jax.tree.structure(updates) == jax.tree.structure(grad)
      return updates, state

    tx = mpjax.dynamic_loss_scale(optax.GradientTransformationExtraArgs(lambda p: (), update))
    tx.update(self.grads, tx.init(self.params), self.params, grad=self.grads)
    assert seen["same"]


@pytest.mark.parametrize("init_scale", [2.0**-10, 1.0, 2.0**16])
@pytest.mark.parametrize("value", [1.0, 1e38, -3.4e38, np.inf, np.nan])
def test_a_step_is_skipped_if_its_unscaled_gradients_are_not_finite(init_scale, value):
  # Below 1, a finite gradient of the scaled loss may be infinite when the scale is taken off.
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=init_scale, min_scale=min(init_scale, 1.0))
  grads = jnp.asarray([1.0, value], jnp.float32)
  _, state = tx.update(grads, tx.init(grads), grads)
  with np.errstate(over="ignore"):
    expected = np.isfinite(np.float32(value) / np.float32(init_scale))
  assert bool(state.grads_finite) == expected


@pytest.mark.parametrize("jit", [False, True])
def test_a_scale_that_has_backed_off_below_1_hides_no_infinity(jit):
  tx = mpjax.dynamic_loss_scale(optax.adam(1.0), min_scale=2.0**-20)
  grads = jnp.asarray([1.0, 1e38], jnp.float32)
  state = tx.init(grads)._replace(scale=jnp.float32(2.0**-10))
  updates, new = (jax.jit(tx.update) if jit else tx.update)(grads, state)
  assert not bool(new.grads_finite)
  assert not np.asarray(updates).any()
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new.inner_state))
  _, new = tx.update(jnp.ones(2), state)
  assert bool(new.grads_finite)


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_with_a_scale_that_is_no_number_a_step_is_skipped(scale):
  tx = mpjax.dynamic_loss_scale(optax.adam(1.0))
  grads = jnp.asarray([1.0, 0.0])
  updates, state = tx.update(grads, tx.init(grads)._replace(scale=jnp.float32(scale)), grads)
  assert not bool(state.grads_finite)
  assert not np.asarray(updates).any()
