"""How the loss scale moves: the rules, the presets against the libraries they are named after, the bounds."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax


def run(tx, finite_steps, state=None):
  """States after each step of a scan over finite and non-finite gradients, stacked; and the last."""

  def step(state, finite):
    _, new = tx.update({"g": jnp.where(finite, 1.0, jnp.nan)}, state)
    return new, new

  first = tx.init({"g": jnp.zeros(())}) if state is None else state
  last, states = jax.lax.scan(step, first, jnp.asarray(finite_steps))
  assert jax.tree.map(lambda x: (x.dtype, x.shape), last) == jax.tree.map(lambda x: (x.dtype, x.shape), first)
  return states, last


def reference_scale(finite_steps, rules):
  """Scale after each step, by hand: grow on the N-th good step, Megatron's patience."""
  scale, good, patience, history = rules["init_scale"], 0, rules["hysteresis"], []
  for finite in finite_steps:
    if finite:
      good += 1
      if rules["consecutive_hysteresis"]:
        patience = rules["hysteresis"]
      if good == rules["growth_interval"]:
        scale, good, patience = (
          min(scale * rules["growth_factor"], rules["max_scale"]),
          0,
          rules["hysteresis"],
        )
    else:
      good, patience = 0, patience - 1
      if patience <= 0:
        scale = max(scale * rules["backoff_factor"], rules["min_scale"])
    history.append(scale)
  return history


RULES = st.fixed_dictionaries(
  {
    "init_scale": st.just(1024.0),
    "growth_interval": st.integers(1, 5),
    "growth_factor": st.sampled_from([2.0, 4.0]),
    "backoff_factor": st.sampled_from([0.5, 0.25]),
    "hysteresis": st.integers(1, 3),
    "consecutive_hysteresis": st.booleans(),
    "min_scale": st.sampled_from([0.25, 1.0, 128.0]),
    "max_scale": st.sampled_from([1024.0, 2.0**20]),
  }
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(finite_steps=st.lists(st.booleans(), min_size=1, max_size=40), rules=RULES)
def test_the_scale_follows_the_rules(finite_steps, rules):
  tx = mpjax.dynamic_loss_scale(optax.identity(), **rules)
  expected = reference_scale(finite_steps, rules)
  states, last = run(tx, finite_steps)
  np.testing.assert_array_equal(states.scale, expected)
  np.testing.assert_array_equal(states.grads_finite, finite_steps)
  assert int(last.skipped_steps) == finite_steps.count(False)
  trailing = next((i for i, finite in enumerate(reversed(finite_steps)) if finite), len(finite_steps))
  assert int(last.consecutive_skips) == trailing


def torch_grad_scaler(finite_steps, interval):
  scale, tracker = 2.0**16, 0
  for finite in finite_steps:
    if finite:
      tracker += 1
      if tracker == interval:
        # The device function leaves the scale alone where the product is not finite in float32.
        scale, tracker = (scale * 2 if np.isfinite(np.float32(scale * 2)) else scale), 0
    else:
      scale, tracker = scale * 0.5, 0
    yield scale


def megatron(finite_steps, interval):
  scale, growth_tracker, hysteresis_tracker = 2.0**32, 0, 2
  for finite in finite_steps:
    if not finite:
      growth_tracker = 0
      hysteresis_tracker -= 1
      if hysteresis_tracker <= 0:
        scale = max(scale * 0.5, 1.0)
    else:
      growth_tracker += 1
      if growth_tracker == interval:
        growth_tracker, hysteresis_tracker, scale = 0, 2, scale * 2.0
    yield scale


def deepspeed(finite_steps, interval, consecutive=False):
  scale, last_overflow, patience = 2.0**16, -1, 2
  for iteration, finite in enumerate(finite_steps):
    if not finite:
      if patience == 1:
        scale = max(scale / 2, 1.0)
      else:
        patience -= 1
      last_overflow = iteration
    else:
      if consecutive:
        patience = 2
      if (iteration - last_overflow) % interval == 0:
        if not consecutive:
          patience = 2
        scale *= 2
    yield scale


def keras(finite_steps, interval):
  scale, counter = 2.0**15, 0
  for finite in finite_steps:
    if not finite:
      scale, counter = scale / 2, 0
    elif counter == interval - 1:
      scale, counter = scale * 2, 0
    else:
      counter += 1
    yield scale


def jmp_itself(finite_steps, interval):
  scale = jmp.DynamicLossScale(jnp.float32(2.0**15), jnp.int32(0), period=interval)
  for finite in finite_steps:
    scale = scale.adjust(jnp.asarray(finite))
    yield float(scale.loss_scale)


def flax_itself(finite_steps, interval):
  scale = DynamicScale(growth_interval=interval - 1, fin_steps=jnp.int32(0), scale=jnp.float32(65536))
  # At 1 the gradient of a finite step is finite; log of a negative number's is not.
  step = jax.jit(lambda scale, x: scale.value_and_grad(jnp.log)(x)[0])
  for finite in finite_steps:
    scale = step(scale, jnp.where(finite, 1.0, jnp.nan))
    yield float(scale.scale)


PRESETS = {
  "grad_scaler": ({}, torch_grad_scaler),
  "megatron": ({}, megatron),
  "deepspeed": ({}, deepspeed),
  "deepspeed, consecutive": (
    {"consecutive_hysteresis": True},
    lambda f, i: deepspeed(f, i, consecutive=True),
  ),
  "keras": ({}, keras),
  "jmp": ({}, jmp_itself),
  "flax": ({}, flax_itself),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_the_steps_of_its_library(name, seed):
  changes, reference = PRESETS[name]
  rng = np.random.default_rng(seed)
  # Bursts of overflow among good stretches: growth, patience and back-off all happen, and about balance.
  finite_steps = rng.random(600) > np.repeat(rng.choice([0.02, 0.02, 0.4], 60), 10)
  tx = mpjax.with_loss_scaling(
    optax.identity(), {"preset": name.split(",")[0], "growth_interval": 5, **changes}
  )
  states, _ = run(tx, finite_steps)
  np.testing.assert_array_equal(states.scale, list(reference(finite_steps, 5)))


@pytest.mark.parametrize(
  ("name", "init_scale", "interval", "hysteresis"),
  [
    ("grad_scaler", 2.0**16, 2000, 1),
    ("megatron", 2.0**32, 1000, 2),
    ("deepspeed", 2.0**16, 1000, 2),
    ("keras", 2.0**15, 2000, 1),
    ("jmp", 2.0**15, 2000, 1),
    ("flax", 2.0**16, 2001, 1),
  ],
)
def test_presets_have_the_defaults_of_their_libraries(name, init_scale, interval, hysteresis):
  preset = mpjax.LossScaling.preset(name)
  assert (preset.init_scale, preset.growth_interval, preset.hysteresis) == (init_scale, interval, hysteresis)
  assert (preset.growth_factor, preset.backoff_factor) == (2, 0.5)
  assert mpjax.get_policy({"base": "fp16", "loss_scaling": name}).loss_scaling == preset
  assert mpjax.get_policy({"base": "fp16", "loss_scaling": {"preset": name}}).loss_scaling == preset


def test_presets_are_changed_by_field_and_unknown_ones_named():
  preset = mpjax.LossScaling.preset("megatron", growth_interval=7)
  assert preset == dataclasses.replace(mpjax.LossScaling.preset("megatron"), growth_interval=7)
  with pytest.raises(ValueError, match=r"unknown loss scaling preset 'megatorn'.*did you mean 'megatron'"):
    mpjax.LossScaling.preset("megatorn")
  with pytest.raises(ValueError, match=r"loss_scaling='megatorn'.*did you mean 'megatron'"):
    mpjax.with_loss_scaling(optax.sgd(0.1), "megatorn")
  with pytest.raises(ValueError, match=r"unknown loss_scaling key 'presets'.*did you mean 'preset'"):
    mpjax.with_loss_scaling(optax.sgd(0.1), {"presets": "jmp"})


@pytest.mark.parametrize(
  ("spec", "scale"),
  [("dynamic", 2.0**16), (8, 8.0), ({"init_scale": 4.0}, 4.0), (mpjax.LossScaling(init_scale=2.0), 2.0)],
)
def test_loss_scaling_from_any_description(spec, scale):
  assert float(mpjax.with_loss_scaling(optax.sgd(0.1), spec).init({}).scale) == scale


@pytest.mark.parametrize("spec", [None, "none", mpjax.get_policy("bf16")])
def test_no_loss_scaling_is_the_transform_itself(spec):
  inner = optax.sgd(0.1)
  assert mpjax.with_loss_scaling(inner, spec) is inner


def test_the_loss_scaling_of_a_policy():
  policy = mpjax.get_policy({"base": "fp16", "loss_scaling": {"init_scale": 32}})
  assert float(mpjax.with_loss_scaling(optax.sgd(0.1), policy).init({}).scale) == 32


def test_swapped_arguments_are_told_the_way_out():
  with pytest.raises(TypeError, match=r"swapped: call mpjax.with_loss_scaling\(tx, loss_scaling\)"):
    mpjax.with_loss_scaling("dynamic", optax.sgd(0.1))


@pytest.mark.parametrize("spec", [jnp.zeros(1000), [object()] * 100, jmp.get_policy("half")])
def test_what_is_no_loss_scaling_is_shown_by_its_type_and_a_short_form(spec):
  with pytest.raises(ValueError, match=f"loss_scaling={type(spec).__name__} ") as error:
    mpjax.with_loss_scaling(optax.sgd(0.1), spec)
  assert len(str(error.value)) < 450


@pytest.mark.parametrize(
  ("field", "value"),
  [("growth_factor", 0.5), ("growth_interval", "often"), ("min_scale", 0), ("hysteresis", [1])],
)
def test_a_static_scale_does_not_look_at_what_it_does_not_use(field, value):
  config = mpjax.LossScaling(kind="static", init_scale=0.5, **{field: value})
  assert config == mpjax.LossScaling(kind="static", init_scale=0.5)
  assert hash(config) == hash(mpjax.LossScaling(kind="static", init_scale=0.5))
  assert float(mpjax.with_loss_scaling(optax.sgd(0.1), config).init({}).scale) == 0.5


@pytest.mark.parametrize(
  ("low", "high"), [(1.0, 2.0**24), (0.7, 100_000.0), (3.0, 70_000.0), (2.0**-126, 2.0**126)]
)
def test_the_scale_stays_a_finite_power_of_two_at_both_bounds(low, high):
  tx = mpjax.dynamic_loss_scale(optax.identity(), growth_interval=1, min_scale=low, max_scale=high)
  up, down = (np.asarray(run(tx, [finite] * 300)[0].scale) for finite in (True, False))
  for scales in (up, down):
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales)
    assert scales.min() >= low
    assert scales.max() <= high
  assert up[-1] > high / 2
  assert down[-1] < low * 2


def test_zero_gradients_for_ever_do_not_make_the_scale_infinite():
  """They are finite, so the scale grows to its bound, and comes down again from there."""
  tx = mpjax.with_loss_scaling(optax.identity(), {"preset": "grad_scaler", "growth_interval": 1})
  _, last = run(tx, [True] * 200)
  assert float(last.scale) == 2.0**126
  updates, _ = tx.update({"g": jnp.float32(2.0**120)}, last)
  assert float(updates["g"]) == 2.0**-6  # the reciprocal is not flushed to zero
  assert float(run(tx, [False], last)[1].scale) == 2.0**125


def test_scales_that_are_not_powers_of_two_reach_the_bounds_exactly():
  tx = mpjax.dynamic_loss_scale(
    optax.identity(), init_scale=1000, growth_interval=1, max_scale=5000, min_scale=300
  )
  _, last = run(tx, [True] * 4)
  assert float(last.scale) == 5000
  assert float(run(tx, [False] * 5, last)[1].scale) == 300


def test_an_overflow_on_the_step_that_would_grow_backs_off():
  tx = mpjax.dynamic_loss_scale(optax.identity(), init_scale=64, growth_interval=3)
  np.testing.assert_array_equal(
    run(tx, [True, True, False, True, True, True])[0].scale, [64, 64, 32, 32, 32, 64]
  )


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("init_scale", v) for v in (0.0, -1.0, math.inf, math.nan, True, "big", 2.0**127, 0.5)],
    *[("growth_factor", v) for v in (1.0, 0.5, 1 + 1e-8, math.inf, math.nan)],
    *[("backoff_factor", v) for v in (0.0, 1.0, 2.0, -0.5, 1 - 1e-16, 1e-60)],
    *[("growth_interval", v) for v in (0, -1, 1.5, True, 2**31)],
    *[("hysteresis", v) for v in (0, 2.5)],
    ("consecutive_hysteresis", 1),
    *[("min_scale", v) for v in (0.0, -1.0, 2.0**25, math.nan)],
    *[("max_scale", v) for v in (math.inf, 2.0**127, 0.0)],
  ],
)
def test_unfit_arguments_are_named_when_built(field, value):
  with pytest.raises(ValueError, match=field):
    mpjax.dynamic_loss_scale(optax.sgd(0.1), **{field: value})


def test_numbers_may_be_arrays_of_no_dimension():
  tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=jnp.float32(4), growth_interval=np.int64(3))
  assert float(tx.init({}).scale) == 4


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 2.0**127, False])
def test_unfit_static_scales_are_refused(scale):
  with pytest.raises(ValueError, match=r"^scale="):
    mpjax.static_loss_scale(optax.sgd(0.1), scale)
