"""Loss scaling in every optax composition: a skipped step leaves no trace, wherever the scale stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax

PARAMS = {"w": jnp.asarray([[0.5, -1.25], [2.0, 0.125]]), "b": jnp.asarray([0.1, -0.2])}
STEPS = [True, False, True, True, False, False, True]


def gradients(i, finite=True):
  """Unscaled gradients of step `i`; not finite: one element of one leaf is an infinity or NaN."""
  rng = np.random.default_rng(i)
  grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), PARAMS)
  if not finite:
    grads["w"] = grads["w"].at[i % 2, 0].set([jnp.inf, -jnp.inf, jnp.nan][i % 3])
  return grads


def times(grads, scale):
  return jax.tree.map(lambda g: g * scale, grads)


def loss(params):
  return sum(jnp.sum(jnp.cosh(p)) for p in jax.tree.leaves(params))


def same_bits(a, b):
  assert a.dtype == b.dtype
  if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
    a, b = jax.random.key_data(a), jax.random.key_data(b)
  assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def close(tree, expected):
  numbers = lambda tree: [
    leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]
  for a, b in zip(numbers(tree), numbers(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


GROUPS = {"w": "a", "b": "b"}
INSIDE = {
  "sgd": lambda: optax.sgd(0.1, momentum=0.9),
  "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1),
  "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.clip(0.3), optax.lion(1e-2)),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10)),
  "ema": lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
  "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1)),
  "partition": lambda: optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, GROUPS),
  "multi_transform": lambda: optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, GROUPS),
  "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
  "flatten": lambda: optax.flatten(optax.adam(0.1)),
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=1),
  "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
  "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
  "muon": lambda: optax.contrib.muon(0.1),
  "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
  "prodigy": lambda: optax.contrib.prodigy(),
}
EXTRA = {
  "sam, opaque": (
    lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
    {"grad_fn": lambda params, i: jax.grad(loss)(params)},
  ),
  "reduce_on_plateau": (
    lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
    {"value": 1.0},
  ),
  "polyak_sgd": (lambda: optax.polyak_sgd(), {"value": 3.0}),
  "backtracking linesearch": (
    lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
    {"value": 3.0, "grad": None, "value_fn": loss},
  ),
  "zoom linesearch": (
    lambda: optax.lbfgs(0.1, linesearch=optax.scale_by_zoom_linesearch(3)),
    {"value": 3.0, "grad": None, "value_fn": loss},
  ),
}


def run_both(plain, wrapped, finite_steps, extra, scaler=lambda state: state):
  """Runs `wrapped` on all steps and `plain` on the finite ones; returns parameters and states of both."""

  def step(tx, params, state, grads):
    arguments = {**extra, "grad": grads} if "grad" in extra else extra
    updates, state = tx.update(grads, state, params, **arguments)
    return mpjax.apply_updates(params, updates), state, updates

  ours = jax.jit(lambda params, state, grads: step(wrapped, params, state, times(grads, scaler(state).scale)))
  theirs = jax.jit(functools.partial(step, plain))
  params, state = PARAMS, wrapped.init(PARAMS)
  expected, plain_state = PARAMS, plain.init(PARAMS)
  for i, finite in enumerate(finite_steps):
    before = params, scaler(state).inner_state
    params, state, updates = ours(params, state, gradients(i, finite))
    assert bool(scaler(state).grads_finite) == finite
    if finite:
      expected, plain_state, _ = theirs(expected, plain_state, gradients(i))
    else:
      assert all((u == 0).all() for u in jax.tree.leaves(updates))
      jax.tree.map(same_bits, (params, scaler(state).inner_state), before)
  # Some transforms of optax start from weakly typed states, which jit traces twice, with us or without.
  assert ours._cache_size() <= max(1, theirs._cache_size())
  return params, state, expected, plain_state


@pytest.mark.parametrize("name", [*INSIDE, *EXTRA])
def test_parameters_and_inner_state_are_those_of_the_finite_steps_alone(name):
  make, extra = EXTRA[name] if name in EXTRA else (INSIDE[name], {})
  make_plain = lambda: optax.with_extra_args_support(make())
  wrapped = mpjax.dynamic_loss_scale(make(), growth_interval=2)
  params, state, expected, plain_state = run_both(make_plain(), wrapped, STEPS, extra)
  close((params, state.inner_state), (expected, plain_state))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
  finite_steps=st.lists(st.booleans(), min_size=1, max_size=12),
  name=st.sampled_from(["adamw with a schedule", "clip", "MultiSteps"]),
)
def test_the_same_for_any_sequence_of_steps(finite_steps, name):
  wrapped = mpjax.dynamic_loss_scale(INSIDE[name](), growth_interval=3)
  params, state, expected, plain_state = run_both(
    optax.with_extra_args_support(INSIDE[name]()), wrapped, finite_steps, {}
  )
  close((params, state.inner_state), (expected, plain_state))


SCALED = lambda inner: mpjax.dynamic_loss_scale(inner, growth_interval=2)
OUTSIDE = {
  "first in a chain": lambda: optax.chain(SCALED(optax.adam(0.1)), optax.scale(1.0)),
  "last in a chain": lambda: optax.chain(optax.identity(), SCALED(optax.adam(0.1))),
  "masked, all": lambda: optax.masked(SCALED(optax.adam(0.1)), {"w": True, "b": True}),
  "partition, one over all": lambda: optax.partition({"a": SCALED(optax.adam(0.1))}, "a"),
  "inject_hyperparams": lambda: optax.inject_hyperparams(
    lambda learning_rate: SCALED(optax.adam(learning_rate))
  )(0.1),
  "flatten": lambda: optax.flatten(SCALED(optax.adam(0.1))),
  "track_skips": lambda: mpjax.track_skips(SCALED(optax.adam(0.1))),
  "named_chain": lambda: optax.named_chain(("scaled", SCALED(optax.adam(0.1)))),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_scale_deep_in_other_transforms(name):
  plain = optax.with_extra_args_support(optax.adam(0.1))
  wrapped = optax.with_extra_args_support(OUTSIDE[name]())
  params, _, expected, _ = run_both(plain, wrapped, STEPS, {}, scaler=mpjax.get_loss_scale)
  close(params, expected)


def test_the_schedule_stands_still_on_a_skip():
  tx = SCALED(optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 10)))
  state = tx.init(PARAMS)
  rates = []
  for i, finite in enumerate(STEPS):
    _, state = tx.update(gradients(i, finite), state, PARAMS)
    rates.append(float(state.inner_state.hyperparams["learning_rate"]))
  np.testing.assert_allclose(rates, [1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7], rtol=1e-6)


def test_two_scales_for_two_losses():
  """A loss scale in each group, as for two networks with losses of their own."""
  tx = optax.partition(
    {"a": mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0), "b": SCALED(optax.sgd(1.0))}, GROUPS
  )
  state = tx.init(PARAMS)
  scale = lambda group: mpjax.get_loss_scale(state, path=f"'{group}'").scale
  grads = gradients(0)
  scaled = {"w": grads["w"] * scale("a"), "b": grads["b"] * scale("b")}
  updates, state = jax.jit(tx.update)(scaled, state, PARAMS)
  close(updates, times(grads, -1.0))
  updates, state = jax.jit(tx.update)({**scaled, "w": scaled["w"] * jnp.nan}, state, PARAMS)
  assert (updates["w"] == 0).all()
  np.testing.assert_allclose(updates["b"], -grads["b"], rtol=1e-6)
  assert (float(scale("a")), float(scale("b"))) == (4.0, 2.0**17)


def test_one_scale_over_two_groups_skips_both():
  tx = SCALED(optax.partition({"a": optax.adam(0.1), "b": optax.adam(0.1)}, GROUPS))
  updates, _ = tx.update({**gradients(0), "w": PARAMS["w"] * jnp.inf}, tx.init(PARAMS), PARAMS)
  assert (updates["b"] == 0).all()
  # Peer: a guard in each group lets the other group go on (trap 21).
  guarded = optax.partition({k: optax.apply_if_finite(optax.adam(0.1), 5) for k in "ab"}, GROUPS)
  updates, _ = guarded.update({**gradients(0), "w": PARAMS["w"] * jnp.inf}, guarded.init(PARAMS), PARAMS)
  assert (updates["b"] != 0).all()


class TestMultiSteps:
  """Accumulation: inside the loss scale it is right, outside it is refused."""

  def test_a_bad_micro_step_inside_is_dropped_and_the_window_goes_on(self):
    tx = SCALED(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    state, total = tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    update = jax.jit(tx.update)
    for i, finite in enumerate([True, False, True]):
      updates, state = update(times(gradients(i, finite), state.scale), state, PARAMS)
      total = optax.apply_updates(total, updates)
    mean = jax.tree.map(lambda a, b: -(a + b) / 2, gradients(0), gradients(2))
    close(total, mean)
    assert int(state.inner_state.gradient_step) == 1

  def test_outside_the_accumulator_of_optax_would_stay_nan(self):
    """The peer's behaviour that the error is about: optax resets by multiplying with zero."""
    guarded = optax.apply_if_finite(optax.sgd(1.0), 100)
    tx = optax.MultiSteps(guarded, 2).gradient_transformation()
    state = tx.init(PARAMS)
    for i in range(6):
      _, state = tx.update(gradients(i, finite=i != 0), state, PARAMS)
    assert not mpjax.all_finite(state.acc_grads)

  @pytest.mark.parametrize("skip", [None, optax.skip_not_finite, lambda *a: optax.skip_not_finite(*a)])
  def test_outside_it_is_refused_by_whoever_sees_the_transform(self, skip):
    multi = optax.MultiSteps(optax.chain(SCALED(optax.sgd(1.0))), 2, should_skip_update_fn=skip)
    tx = optax.masked(multi.gradient_transformation(), True)
    assert float(mpjax.get_loss_scale(tx.init(PARAMS)).scale) == 2.0**16
    message = r"MultiSteps stands outside.*put it inside.*accumulate="
    with pytest.raises(ValueError, match=message):
      mpjax.check_loss_scaling(tx, PARAMS)
    step = mpjax.make_train_step(lambda params, batch: loss(params), tx, "fp32")
    with pytest.raises(ValueError, match=message):
      step.init(PARAMS)
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(step.tx.init, PARAMS)

  def test_a_guard_outside_protects_a_scale_further_in(self):
    inner = optax.MultiSteps(mpjax.static_loss_scale(optax.sgd(1.0), 8.0), 2).gradient_transformation()
    tx = SCALED(inner)
    state = tx.init(PARAMS)
    for i, finite in enumerate([True, False, True]):
      _, state = tx.update(times(gradients(i, finite), state.scale), state, PARAMS)
    assert mpjax.all_finite(state.inner_state)

  @pytest.mark.parametrize("skip", [optax.skip_not_finite, lambda *a: optax.skip_not_finite(*a)])
  def test_outside_a_static_scale_bad_micro_steps_can_be_dropped(self, skip):
    tx = optax.MultiSteps(
      mpjax.static_loss_scale(optax.sgd(1.0), 8.0), 2, should_skip_update_fn=skip
    ).gradient_transformation()
    state, total = tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    for i, finite in enumerate([True, False, True]):
      updates, state = tx.update(times(gradients(i, finite), 8.0), state, PARAMS)
      total = optax.apply_updates(total, updates)
    close(total, jax.tree.map(lambda a, b: -(a + b) / 2, gradients(0), gradients(2)))


def test_apply_if_finite_outside_hides_the_first_overflows():
  """Documented: the scale backs off only when optax gives up, and even then nothing bad is applied."""
  tx = optax.apply_if_finite(SCALED(optax.sgd(1.0)), 2)
  state, scales = tx.init(PARAMS), []
  for i in range(5):
    updates, state = tx.update(gradients(i, finite=False), state, PARAMS)
    scales.append(float(mpjax.get_loss_scale(state).scale))
    assert all((u == 0).all() for u in jax.tree.leaves(updates))
  assert scales[0] == 2.0**16 > scales[-1]


@pytest.mark.parametrize("jit", [False, True])
def test_the_argument_grad_is_unscaled_and_no_other(jit):
  def update(updates, state, params=None, *, value, grad, other):
    return {"updates": updates, "value": value, "grad": grad, "other": other}, state

  tx = SCALED(optax.GradientTransformationExtraArgs(lambda params: (), update))
  state = tx.init(PARAMS)
  grads, more = (times(gradients(i), state.scale) for i in range(2))
  run = jax.jit(tx.update) if jit else tx.update
  seen, _ = run(grads, state, PARAMS, value=2.5, grad=more, other=grads)
  close(seen["updates"], gradients(0))
  close(seen["grad"], gradients(1))
  close(seen["other"], grads)
  assert seen["value"] == 2.5
  on_host = jax.tree.map(np.asarray, grads)
  close(run(on_host, state, PARAMS, value=2.5, grad=on_host, other=0)[0]["grad"], gradients(0))


def test_train_state_of_flax():
  state = TrainState.create(apply_fn=None, params=PARAMS, tx=SCALED(optax.adam(0.1)))
  plain = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
  step = jax.jit(
    lambda state, grads: state.apply_gradients(
      grads=times(grads, mpjax.get_loss_scale(state.opt_state).scale)
    )
  )
  for i, finite in enumerate(STEPS):
    state = step(state, gradients(i, finite))
    plain = plain.apply_gradients(grads=gradients(i)) if finite else plain
  close(state.params, plain.params)


def test_nnx_optimizer():
  def train(tx, finite_steps, scaled):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
      of = lambda m: jnp.sum((m(x) - 1) ** 2)
      grads = nnx.grad(lambda m: mpjax.scale_loss(of(m), optimizer) if scaled else of(m))(model)
      optimizer.update(model, grads)

    for i, finite in enumerate(finite_steps):
      if finite or scaled:
        step(model, optimizer, jnp.full((3, 2), (i + 1.0) if finite else jnp.inf))
    return nnx.state(model), optimizer

  params, optimizer = train(SCALED(optax.adam(0.1)), STEPS, scaled=True)
  expected, _ = train(optax.adam(0.1), STEPS, scaled=False)
  close(params, expected)
  assert int(mpjax.get_loss_scale(optimizer).skipped_steps) == 3


@settings(max_examples=10, deadline=None)
@given(
  finite_steps=st.lists(st.booleans(), min_size=1, max_size=12),
  exponents=st.tuples(*[st.integers(-8, 20)] * 2),
)
def test_power_of_two_scales_give_the_same_bits(finite_steps, exponents):
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1), init_scale=1.0, min_scale=2.0**-60, max_scale=2.0**60)
  results = []
  for exponent in exponents:
    params, state = PARAMS, tx.init(PARAMS)._replace(scale=jnp.float32(2.0**exponent))
    for i, finite in enumerate(finite_steps):
      params, state = _adamw_step(params, state, gradients(i, finite))
    results.append((params, state.inner_state))
  jax.tree.map(same_bits, *results)


@jax.jit
def _adamw_step(params, state, grads):
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1), init_scale=1.0, min_scale=2.0**-60, max_scale=2.0**60)
  updates, state = tx.update(times(grads, state.scale), state, params)
  return optax.apply_updates(params, updates), state
