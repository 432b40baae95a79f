"""`dynamic_loss_scale` and `static_loss_scale`: the state machine, the skip, and the compositions."""

import functools
import math

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import mpjax

PARAMS = {"w": jnp.asarray([[0.5, -1.25], [2.0, 0.125]]), "b": jnp.asarray([0.1, -0.2])}


def gradients(i, finite=True, params=PARAMS):
  """Unscaled gradients of step `i`; not finite: one element of one leaf is an infinity or NaN."""
  rng = np.random.default_rng(i)
  grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
  if not finite:
    bad = [jnp.inf, -jnp.inf, jnp.nan][i % 3]
    grads["w"] = grads["w"].at[i % 2, 0].set(bad)
  return grads


def scaled(grads, state):
  return jax.tree.map(lambda g: g * state.scale, grads)


def reference_scale(finite_steps, *, init, growth, backoff, interval, low, high, hysteresis):
  """Scale before each step and after the last, by hand: grow on the N-th good step, Megatron's patience."""
  scale, good, patience, history = init, 0, hysteresis, [init]
  for finite in finite_steps:
    if finite:
      good += 1
      if good == interval:
        scale, good, patience = min(scale * growth, high), 0, hysteresis
    else:
      good, patience = 0, patience - 1
      if patience <= 0:
        scale = max(scale * backoff, low)
    history.append(scale)
  return history


@settings(max_examples=25, deadline=None)
@given(
  finite_steps=st.lists(st.booleans(), min_size=1, max_size=40),
  interval=st.integers(1, 5),
  growth=st.sampled_from([2.0, 4.0]),
  backoff=st.sampled_from([0.5, 0.25]),
  hysteresis=st.integers(1, 3),
  low=st.sampled_from([0.25, 1.0, 128.0]),
  high=st.sampled_from([1024.0, 2.0**20]),
)
def test_the_scale_follows_the_rules(finite_steps, interval, growth, backoff, hysteresis, low, high):
  tx = mpjax.dynamic_loss_scale(
    optax.identity(),
    init_scale=1024,
    growth_factor=growth,
    backoff_factor=backoff,
    growth_interval=interval,
    min_scale=low,
    max_scale=high,
    hysteresis=hysteresis,
  )
  expected = reference_scale(
    finite_steps,
    init=1024.0,
    growth=growth,
    backoff=backoff,
    interval=interval,
    low=low,
    high=high,
    hysteresis=hysteresis,
  )

  def step(state, finite):
    _, new = tx.update({"g": jnp.where(finite, 1.0, jnp.nan)}, state)
    return new, new

  first = tx.init({"g": jnp.zeros(())})
  last, states = jax.lax.scan(step, first, jnp.asarray(finite_steps))
  np.testing.assert_array_equal(states.scale, expected[1:])
  np.testing.assert_array_equal(states.grads_finite, finite_steps)
  assert int(last.skipped_steps) == finite_steps.count(False)
  trailing = next((i for i, finite in enumerate(reversed(finite_steps)) if finite), len(finite_steps))
  assert int(last.consecutive_skips) == trailing
  assert jax.tree.map(lambda x: (x.dtype, x.shape), last) == jax.tree.map(lambda x: (x.dtype, x.shape), first)


@pytest.mark.parametrize(
  ("low", "high"), [(1.0, 2.0**24), (0.7, 100_000.0), (3.0, 70_000.0), (2.0**-126, 2.0**126)]
)
def test_the_scale_stays_a_finite_power_of_two_at_both_bounds(low, high):
  tx = mpjax.dynamic_loss_scale(optax.identity(), growth_interval=1, min_scale=low, max_scale=high)

  def run(finite):
    def step(state, _):
      _, state = tx.update({"g": jnp.where(finite, 1.0, jnp.inf)}, state)
      return state, state.scale

    return np.asarray(jax.lax.scan(step, tx.init({"g": jnp.zeros(())}), None, length=300)[1])

  for scales in (run(True), run(False)):
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales)
    assert scales.min() >= low
    assert scales.max() <= high
  assert run(True)[-1] > high / 2
  assert run(False)[-1] < low * 2


def test_scales_that_are_not_powers_of_two_reach_the_bounds_exactly():
  tx = mpjax.dynamic_loss_scale(
    optax.identity(), init_scale=1000, growth_interval=1, max_scale=5000, min_scale=300
  )
  _, state = tx.update({"g": jnp.ones(())}, tx.init({"g": jnp.ones(())}))
  for _ in range(3):
    _, state = tx.update({"g": jnp.ones(())}, state)
  assert float(state.scale) == 5000
  for _ in range(5):
    _, state = tx.update({"g": jnp.full((), jnp.inf)}, state)
  assert float(state.scale) == 300


OPTIMIZERS = {
  "sgd": lambda: optax.sgd(0.1, momentum=0.9),
  "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1),
  "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.clip(0.3), optax.lion(1e-2)),
  "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10)),
  "ema": lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
  "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1)),
  "groups": lambda: optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
  "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=1),
  "multi-steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.1),
  "muon": lambda: optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_leave_no_trace(name):
  """Parameters and inner state equal plain optax's, fed the finite steps alone."""
  plain, wrapped = OPTIMIZERS[name](), mpjax.dynamic_loss_scale(OPTIMIZERS[name](), growth_interval=2)
  finite_steps = [True, False, True, True, False, False, True]
  params, expected = PARAMS, PARAMS
  state, plain_state = wrapped.init(params), plain.init(expected)

  @jax.jit
  def step(params, state, grads):
    updates, state = wrapped.update(scaled(grads, state), state, params)
    return optax.apply_updates(params, updates), state, updates

  @jax.jit
  def plain_step(params, state, grads):
    updates, state = plain.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for i, finite in enumerate(finite_steps):
    before = params, state.inner_state
    params, state, updates = step(params, state, gradients(i, finite))
    if finite:
      expected, plain_state = plain_step(expected, plain_state, gradients(i))
    else:
      assert all((u == 0).all() for u in jax.tree.leaves(updates))
      jax.tree.map(same_bits, (params, state.inner_state), before)
  close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7)
  numbers = lambda tree: [
    leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]
  for a, b in zip(numbers((params, state.inner_state)), numbers((expected, plain_state)), strict=True):
    close(a, b)
  assert step._cache_size() == 1


def same_bits(a, b):
  assert a.dtype == b.dtype
  if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
    a, b = jax.random.key_data(a), jax.random.key_data(b)
  assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@settings(max_examples=10, deadline=None)
@given(
  finite_steps=st.lists(st.booleans(), min_size=1, max_size=12),
  exponents=st.tuples(*[st.integers(-8, 20)] * 2),
)
def test_power_of_two_scales_give_the_same_bits(finite_steps, exponents):
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1), init_scale=1.0, min_scale=2.0**-60, max_scale=2.0**60)

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(scaled(grads, state), state, params)
    return optax.apply_updates(params, updates), state

  results = []
  for exponent in exponents:
    params, state = PARAMS, tx.init(PARAMS)._replace(scale=jnp.float32(2.0**exponent))
    for i, finite in enumerate(finite_steps):
      params, state = step(params, state, gradients(i, finite))
    results.append((params, state.inner_state))
  jax.tree.map(same_bits, *results)


def test_float16_gradients_are_widened_before_they_are_unscaled():
  tx = mpjax.dynamic_loss_scale(optax.identity(), init_scale=2.0**16)
  grads = {"g": jnp.asarray(1e-8 * 2**16, jnp.float16)}
  updates, _ = tx.update(grads, tx.init(grads))
  assert updates["g"].dtype == jnp.float32
  np.testing.assert_allclose(updates["g"], 1e-8, rtol=1e-3)
  # jmp divides in float16, where 1e-8 is zero.
  assert jmp.StaticLossScale(jnp.float16(2**15)).unscale(jnp.float16(1e-8 * 2**15)) == 0


def test_a_scale_below_one_catches_what_overflows_only_when_unscaled():
  tx = mpjax.static_loss_scale(optax.identity(), 2.0**-120)
  grads = {"g": jnp.asarray(60_000.0)}
  updates, state = tx.update(grads, tx.init(grads))
  assert not state.grads_finite
  assert float(updates["g"]) == 0


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


@pytest.mark.parametrize("skip", [True, False])
def test_static_scale(skip):
  tx = mpjax.static_loss_scale(optax.sgd(1.0), 8.0, skip_nonfinite=skip)
  state = tx.init(PARAMS)
  updates, state = tx.update(scaled(gradients(0), state), state, PARAMS)
  jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -g, rtol=1e-6), updates, gradients(0))
  updates, state = tx.update(gradients(1, finite=False), state, PARAMS)
  assert float(state.scale) == 8
  assert (int(state.skipped_steps), bool(state.grads_finite)) == (1, False)
  assert bool(mpjax.all_finite(updates)) == skip


def test_half_precision_parameters_keep_the_dtypes_of_the_state():
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))

  def step(carry, i):
    params, state = carry
    grads = jax.tree.map(lambda p: (p * state.scale).astype(p.dtype), params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  (new, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(3))
  assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, tx.init(params))
  assert new["w"].dtype == jnp.bfloat16


def test_extra_arguments_reach_the_inner_transform():
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
  tx = mpjax.dynamic_loss_scale(inner)
  state, plain_state = tx.init(PARAMS), inner.init(PARAMS)
  for _ in range(4):
    updates, state = tx.update(scaled(gradients(0), state), state, PARAMS, value=1.0)
    expected, plain_state = inner.update(gradients(0), plain_state, PARAMS, value=1.0)
  np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-6)
  assert abs(float(updates["b"][0])) < abs(float(gradients(0)["b"][0]))  # the plateau was seen


def test_members_of_an_ensemble_have_their_own_scale():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=16.0)
  params = {"w": jnp.ones((3, 2))}
  state = jax.vmap(tx.init)(params)
  grads = {"w": jnp.asarray([[1.0, 1.0], [jnp.inf, 1.0], [1.0, 1.0]])}
  updates, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
  np.testing.assert_array_equal(state.scale, [16, 8, 16])
  np.testing.assert_array_equal((updates["w"] != 0).all(1), [True, False, True])
  np.testing.assert_array_equal(state.inner_state[0].count, [1, 0, 1])


def test_every_shard_takes_the_same_decision():
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), axis_name="d")
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  grads = jnp.ones((8,)).at[5].set(jnp.inf)

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False
  )
  def step(grads):
    state = tx.init(grads)
    updates, state = tx.update(grads, state)
    return updates, state.scale[None], state.grads_finite[None]

  updates, scale, finite = step(grads)
  np.testing.assert_array_equal(updates, np.zeros(8))
  np.testing.assert_array_equal(scale, np.full(8, 2.0**15))
  assert not finite.any()


def test_sharded_gradients_are_judged_as_one_under_jit():
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  put = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  params = {"w": put(jnp.ones((16, 2)))}
  state = tx.init(params)
  bad = {"w": put(jnp.ones((16, 2)).at[13, 1].set(jnp.nan))}
  updates, state = jax.jit(tx.update)(bad, state, params)
  assert not state.grads_finite
  assert (updates["w"] == 0).all()
  assert state.scale.sharding.is_fully_replicated
  assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_one_trace_ahead_of_time_compilation_and_no_host_transfer():
  traces = []
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.copy, PARAMS)
  state = tx.init(params)
  grads = gradients(0)
  shapes = jax.eval_shape(step, params, state, grads)
  assert jax.tree.structure(shapes[1]) == jax.tree.structure(state)
  compiled = step.lower(params, state, grads).compile()
  # All but `grads_finite` of the last step, which no step reads.
  size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state._replace(grads_finite=None))))
  assert compiled.memory_analysis().alias_size_in_bytes == size
  traces.clear()
  jax.clear_caches()
  with jax.transfer_guard("disallow"):
    for _ in range(4):
      params, state = step(params, state, grads)
  assert len(traces) == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_a_skip_is_selects_and_no_conditional(platform):
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))
  state = tx.init(PARAMS)
  text = jax.export.export(jax.jit(tx.update), platforms=[platform])(PARAMS, state, PARAMS).mlir_module()
  assert "stablehlo.case" not in text
  assert "stablehlo.if" not in text


def test_the_new_state_is_not_held_beside_the_kept_one():
  # Adam's update is computed from its new moments: selected at the end, both would be in memory.
  params = {"w": jnp.ones((512, 512))}
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))

  def step(params, state, x):
    grads = jax.grad(lambda p: mpjax.scale_loss(jnp.tanh(x @ p["w"]).sum(), state))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  memory = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), jnp.ones((8, 512))).compile()
  assert memory.memory_analysis().temp_size_in_bytes < 1.5 * params["w"].nbytes


def test_the_state_survives_a_trip_through_numpy():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  state = tx.init(PARAMS)
  restored = jax.tree.map(np.asarray, state)
  step = jax.jit(tx.update)
  jax.tree.map(same_bits, step(gradients(0), state, PARAMS), step(gradients(0), restored, PARAMS))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("init_scale", v) for v in (0.0, -1.0, math.inf, math.nan, True, "big", 2.0**127, 0.5)],
    *[("growth_factor", v) for v in (1.0, 0.5, math.inf, math.nan)],
    *[("backoff_factor", v) for v in (0.0, 1.0, 2.0, -0.5)],
    *[("growth_interval", v) for v in (0, -1, 1.5, True)],
    *[("hysteresis", v) for v in (0, 2.5)],
    *[("min_scale", v) for v in (0.0, -1.0, 2.0**25, math.nan)],
    *[("max_scale", v) for v in (math.inf, 2.0**127, 0.0)],
  ],
)
def test_unfit_arguments_are_named_when_built(field, value):
  with pytest.raises(ValueError, match=field):
    mpjax.dynamic_loss_scale(optax.sgd(0.1), **{field: value})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 2.0**127, False])
def test_unfit_static_scales_are_refused(scale):
  with pytest.raises(ValueError, match=r"^scale="):
    mpjax.static_loss_scale(optax.sgd(0.1), scale)


def test_state_that_is_passed_on_swapped_or_kept_twice_is_still_kept():
  """Whatever an inner transform does with the leaves of its state, a skip leaves them be."""

  def update(grads, state, params=None):
    a, b, *_ = state
    same = a + grads
    return same, (b, a, same, same, 3.0)

  tx = mpjax.static_loss_scale(
    optax.GradientTransformation(lambda p: tuple(map(jnp.float32, range(5))), update), 1.0
  )
  state = tx.init(None)
  _, moved = jax.jit(tx.update)(jnp.float32(10), state)
  assert [float(x) for x in moved.inner_state] == [1, 0, 10, 10, 3]
  _, kept = jax.jit(tx.update)(jnp.float32(jnp.nan), moved)
  assert [float(x) for x in kept.inner_state] == [1, 0, 10, 10, 3]


def test_a_changed_structure_of_the_state_is_named():
  tx = mpjax.static_loss_scale(
    optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, (g,))), 1.0
  )
  with pytest.raises(ValueError, match="changed the structure of its state"):
    tx.update(jnp.ones(()), tx.init(None))


def test_collectives_inside_the_wrapped_transform():
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  mean = optax.stateless(lambda grads, params: jax.tree.map(lambda g: jax.lax.pmean(g, "d"), grads))
  tx = mpjax.dynamic_loss_scale(optax.chain(mean, optax.trace(0.9)), init_scale=2.0, axis_name="d")

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec(), check_vma=False
  )
  def step(grads):
    return tx.update(grads, tx.init(grads))[0]

  np.testing.assert_allclose(step(jnp.arange(8.0)), [1.75])


def test_updates_can_be_differentiated():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=4.0)

  def after(grads):
    updates, _ = tx.update({"g": grads * 4}, tx.init({"g": grads}))
    return updates["g"].sum()

  plain = lambda grads: optax.adam(0.1).update(grads, optax.adam(0.1).init(grads))[0].sum()
  grads = jnp.asarray([1e-9, -2e-9])
  np.testing.assert_allclose(jax.grad(after)(grads), jax.grad(plain)(grads), rtol=1e-4)
