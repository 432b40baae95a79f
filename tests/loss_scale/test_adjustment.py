"""How the loss scale moves: the rules, the presets against their libraries, the bounds."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import mpjax
from mpjax.policy import _loss_scaling

SGD = optax.sgd(0.1)
F32 = np.float32
ZERO = {"g": F32(0)}


def run(tx, finite_steps, state=None):
  """The states after each step of a scan over finite and non-finite gradients, stacked; and the last."""

  def step(state, finite):
    _, new = tx.update({"g": jnp.where(finite, 1.0, jnp.nan)}, state)
    return new, new

  state = tx.init(ZERO) if state is None else state
  last, states = jax.jit(lambda state, finite: jax.lax.scan(step, state, finite))(state, finite_steps)
  return jax.tree.map(np.asarray, states), last


def scales(finite_steps, **settings):
  """The scales after each step of a dynamic loss scale."""
  return run(mpjax.dynamic_loss_scale(optax.identity(), **settings), np.asarray(finite_steps))[0].scale


def reference_scale(finite_steps, rules):
  """Scale after each step, by hand: grow on the N-th good step, Megatron's patience."""
  scale, good, patience, history = rules["init_scale"], 0, rules["hysteresis"], []
  for finite in finite_steps:
    if finite:
      good += 1
      if good == rules["growth_interval"]:
        scale, good = min(scale * rules["growth_factor"], rules["max_scale"]), 0
        patience = rules["hysteresis"]
    else:
      good, patience = 0, patience - 1
      if patience <= 0:
        scale = max(scale * rules["backoff_factor"], rules["min_scale"])
    history.append(scale)
  return history


# growth_interval, growth_factor, backoff_factor, hysteresis, min_scale, max_scale.
RULES = (
  (1, 2.0, 0.5, 1, 128.0, 2.0**12),
  (2, 4.0, 0.25, 1, 1.0, 2.0**20),
  (3, 2.0, 0.25, 2, 0.25, 2.0**20),
  (5, 4.0, 0.5, 2, 1.0, 2.0**20),
  (3, 2.0, 0.5, 3, 1.0, 1024.0),
)


@pytest.mark.parametrize("row", RULES, ids=str)
def test_the_scale_follows_the_rules(row):
  fields = ("growth_interval", "growth_factor", "backoff_factor", "hysteresis")
  rules = dict(zip((*fields, "min_scale", "max_scale"), row, strict=True), init_scale=1024.0)
  # Bursts of overflow, stretches without, and all that lies between; at the end some of each.
  rng = np.random.default_rng(0)
  finite_steps = rng.random(200) > np.repeat(rng.choice([0.02, 0.3, 0.9], 20), 10)
  finite_steps = np.concatenate([finite_steps, [True] * 20, [False] * 9])
  states, last = run(mpjax.dynamic_loss_scale(optax.identity(), **rules), finite_steps)
  np.testing.assert_array_equal(states.scale, reference_scale(finite_steps, rules))
  np.testing.assert_array_equal(states.grads_finite, finite_steps)
  np.testing.assert_array_equal(states.skipped_steps, np.cumsum(~finite_steps))
  assert (int(last.consecutive_skips), int(last.good_steps)) == (9, 0)
  assert states.consecutive_skips[200 + 19] == 0
  assert states.good_steps.max() == min(row[0] - 1, 20)


def counting(finite_steps, interval, scale, count=0):
  """The rule of torch's GradScaler and of Keras."""
  for finite in finite_steps:
    count = count + 1 if finite else 0
    if not finite:
      scale *= 0.5
    elif count == interval:
      scale, count = scale * 2, 0
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


def deepspeed(finite_steps, interval):
  scale, last_overflow, patience = 2.0**16, -1, 2
  for iteration, finite in enumerate(finite_steps):
    if not finite:
      if patience == 1:
        scale = max(scale / 2, 1.0)
      else:
        patience -= 1
      last_overflow = iteration
    elif (iteration - last_overflow) % interval == 0:
      patience = 2
      scale *= 2
    yield scale


def jmp_itself(finite_steps, scale):
  step = jax.jit(lambda scale, finite: scale.adjust(finite))
  for finite in finite_steps:
    # Its lowest scale is lost under jit.
    scale = dataclasses.replace(step(scale, finite), min_loss_scale=scale.min_loss_scale)
    yield float(scale.loss_scale)


def flax_itself(finite_steps, scale):
  # At 1 the gradient of a finite step is finite; log of a negative number's is not.
  step = jax.jit(lambda scale, x: scale.value_and_grad(jnp.log)(x)[0])
  for finite in finite_steps:
    scale = step(scale, F32(1 if finite else np.nan))
    yield float(scale.scale)


def jmp_scale(scale, interval, count=0):
  return jmp.DynamicLossScale(F32(scale), np.int32(count), period=interval, min_loss_scale=F32(1))


def flax_scale(scale, interval, count=0):
  return DynamicScale(growth_interval=interval - 1, fin_steps=np.int32(count), scale=F32(scale))


# Name to (the library or its rule, first scale, growth interval, hysteresis).
PRESETS = {
  "grad_scaler": (lambda f, i: counting(f, i, 2.0**16), 2.0**16, 2000, 1),
  "megatron": (megatron, 2.0**32, 1000, 2),
  "deepspeed": (deepspeed, 2.0**16, 1000, 2),
  "keras": (lambda f, i: counting(f, i, 2.0**15), 2.0**15, 2000, 1),
  "jmp": (lambda f, i: jmp_itself(f, jmp_scale(2.0**15, i)), 2.0**15, 2000, 1),
  "flax": (lambda f, i: flax_itself(f, flax_scale(2.0**16, i)), 2.0**16, 2001, 1),
}


def test_every_preset_has_a_reference_and_is_documented():
  page = (pathlib.Path(__file__).parents[2] / "docs" / "loss_scaling.md").read_text()
  for name in _loss_scaling.PRESETS:
    assert name in PRESETS
    assert f"`{name}`" in page, name
    assert f"`{name}`" in mpjax.LossScaling.preset.__doc__, name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_the_steps_of_its_library_and_has_its_defaults(name):
  reference, *defaults = PRESETS[name]
  preset = mpjax.LossScaling.preset(name)
  assert [preset.init_scale, preset.growth_interval, preset.hysteresis] == defaults
  assert (preset.growth_factor, preset.backoff_factor) == (2, 0.5)
  for loss_scaling in (name, {"preset": name}):
    assert mpjax.get_policy({"base": "fp16", "loss_scaling": loss_scaling}).loss_scaling == preset
  # Bursts of overflow among good stretches: growth, patience and back-off all happen, and about balance.
  rng = np.random.default_rng(0)
  finite_steps = rng.random(600) > np.repeat(rng.choice([0.02, 0.02, 0.4], 60), 10)
  tx = mpjax.with_loss_scaling(optax.identity(), {"preset": name, "growth_interval": 5})
  np.testing.assert_array_equal(run(tx, finite_steps)[0].scale, list(reference(finite_steps, 5)))


def test_presets_are_changed_by_field_and_unknown_ones_named():
  preset = mpjax.LossScaling.preset("megatron", growth_interval=7)
  assert preset == dataclasses.replace(mpjax.LossScaling.preset("megatron"), growth_interval=7)
  with pytest.raises(ValueError, match=r"unknown loss scaling preset 'megatorn'.*did you mean 'megatron'"):
    mpjax.LossScaling.preset("megatorn")


STRING = "params=float32,compute=float16,output=float32"
# What `with_loss_scaling` takes, and the scale that it says.
SPECS = [
  ("dynamic", 2.0**16),
  (8, 8),
  ("1024", 1024),
  ({"init_scale": 4.0}, 4),
  (mpjax.LossScaling(init_scale=2.0), 2),
  (mpjax.get_policy({"base": "fp16", "loss_scaling": {"init_scale": 32}}), 32),
  ("fp16", 2.0**16),
  ("16-mixed", 2.0**16),
  ("mixed_float16", 2.0**16),
  (f"{STRING},loss_scaling=64", 64),
  ("keras", 2.0**15),  # words for a loss scaling keep their meaning
  *((spec, None) for spec in (None, "none", mpjax.get_policy("bf16"), "bf16", "bf16-mixed", "fp32", "half")),
  (STRING, None),
]


def test_with_loss_scaling_takes_any_description_and_a_policys_name(monkeypatch):
  for spec, scale in SPECS:
    tx = mpjax.with_loss_scaling(SGD, spec)
    assert (tx is SGD) if scale is None else (float(tx.init({}).scale) == scale), spec
  for backend, scaled in (("cpu", False), ("tpu", False), ("gpu", True)):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    assert (mpjax.with_loss_scaling(SGD, "auto") is not SGD) == scaled, backend


NEITHER = r"neither a loss scaling \(none, dynamic,.*nor a policy.*did you mean '"
# What it does not take, and what it says.
NO_SPECS = [
  ("megatorn", r"loss_scaling='megatorn'.*did you mean 'megatron'"),
  ({"presets": "jmp"}, r"unknown loss_scaling key 'presets'.*did you mean 'preset'"),
  (
    {"consecutive_hysteresis": True},
    "key 'consecutive_hysteresis'.*leave it out: growth restores",
  ),
  ("fp61", NEITHER + "fp16"),
  ("kears", NEITHER + "keras"),
  ("p=f32,c=f61", NEITHER + "f"),
  (np.zeros(1000), "loss_scaling=array.* of type ndarray"),
  ([object()] * 100, "loss_scaling=.* of type list"),
  (jmp.get_policy("half"), "loss_scaling=.* of type Policy"),
  ((mpjax.get_policy("fp16"),) * 2, "loss_scaling=.* of type tuple"),
]


def test_what_is_no_loss_scaling_is_named_in_short():
  for spec, message in NO_SPECS:
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
      mpjax.with_loss_scaling(SGD, spec)
    assert len(str(error.value)) < 450 or isinstance(spec, str), spec
  with pytest.raises(TypeError, match=r"swapped: call mpjax.with_loss_scaling\(tx, loss_scaling\)"):
    mpjax.with_loss_scaling("dynamic", SGD)


def test_a_static_scale_does_not_look_at_what_it_does_not_use():
  plain = mpjax.LossScaling(kind="static", init_scale=0.5)
  for field in ({"growth_factor": 0.5}, {"growth_interval": "often"}, {"min_scale": 0}, {"hysteresis": [1]}):
    config = mpjax.LossScaling(kind="static", init_scale=0.5, **field)
    assert (config, hash(config)) == (plain, hash(plain)), field
    assert float(mpjax.with_loss_scaling(SGD, config).init({}).scale) == 0.5, field


def test_the_scale_stays_a_finite_power_of_two_at_both_bounds():
  for low, high in ((1.0, 2.0**24), (2.0**-126, 2.0**126)):
    found = scales([True] * 300 + [False] * 300, growth_interval=1, min_scale=low, max_scale=high)
    assert all(math.frexp(scale)[0] == 0.5 for scale in found)
    assert (found.min(), found.max(), found[-1]) == (low, high, low)
  # Zero gradients for ever do not make it infinite, and its reciprocal is not flushed to zero.
  tx = mpjax.with_loss_scaling(optax.identity(), {"preset": "grad_scaler", "growth_interval": 1})
  _, last = run(tx, np.asarray([True] * 200))
  updates, new = jax.jit(tx.update)({"g": F32(2.0**120)}, last)
  assert (float(updates["g"]), float(new.scale)) == (2.0**-6, 2.0**126)


def test_scales_that_are_not_powers_of_two_reach_the_bounds_and_an_overflow_comes_before_growth():
  found = scales([True] * 4 + [False] * 5, init_scale=1000, growth_interval=1, max_scale=5000, min_scale=300)
  assert (found[3], found[-1]) == (5000, 300)
  found = scales([True, True, False, True, True, True], init_scale=64, growth_interval=3)
  assert list(found) == [64, 64, 32, 32, 32, 64]


UNFIT = {
  "init_scale": (0.0, -1.0, math.inf, math.nan, True, "big", 2.0**127, 0.5),
  "growth_factor": (1.0, 0.5, 1 + 1e-8, math.inf, math.nan),
  "backoff_factor": (0.0, 1.0, 2.0, -0.5, 1 - 1e-16, 1e-60),
  "growth_interval": (0, -1, 1.5, True, 2**31),
  "hysteresis": (0, 2.5),
  "min_scale": (0.0, -1.0, 2.0**25, math.nan),
  "max_scale": (math.inf, 2.0**127, 0.0),
}


def test_unfit_arguments_are_named_when_built():
  for field, values in UNFIT.items():
    for value in values:
      with pytest.raises(ValueError, match=field):
        mpjax.dynamic_loss_scale(SGD, **{field: value})
  for scale in (0.0, -1.0, math.inf, math.nan, 2.0**127, False):
    with pytest.raises(ValueError, match=r"^scale="):
      mpjax.static_loss_scale(SGD, scale)
  # Numbers may be arrays of no dimension.
  tx = mpjax.dynamic_loss_scale(SGD, init_scale=jnp.float32(4), growth_interval=np.int64(3))
  assert float(tx.init({}).scale) == 4


FINITE = np.random.default_rng(0).random(60) > 0.15


# Preset to (the library's loss scale after three finite steps, what it does then, fields of the state for it).
RUNNING = {
  "grad_scaler": ({}, lambda f, _: counting(f, 4, 2.0**12, 3), lambda _: (2.0**12, 3)),
  "jmp": (jmp_scale(2.0**12, 4, 3), jmp_itself, lambda source: (source.loss_scale, source.counter)),
  "flax": (flax_scale(2.0**12, 4, 3), flax_itself, lambda source: (source.scale, source.fin_steps)),
}


@pytest.mark.parametrize("preset", RUNNING)
def test_a_run_goes_on_where_another_library_stopped(preset):
  """As docs/migration.md writes it."""
  source, reference, fields = RUNNING[preset]
  tx = mpjax.with_loss_scaling(optax.trace(0.9), {"preset": preset, "growth_interval": 4})
  scale, good_steps = fields(source)
  state = tx.init(ZERO)._replace(scale=jnp.float32(scale), good_steps=jnp.int32(good_steps))
  np.testing.assert_array_equal(run(tx, FINITE, state)[0].scale, list(reference(FINITE, source)))


def test_gradients_count_and_updates_are_blamed_each_for_themselves():
  tx = mpjax.dynamic_loss_scale(optax.rmsprop(1e-3, eps=0.0), init_scale=4.0, growth_interval=2)
  params, ones = {"w": np.ones(2, np.float32)}, {"w": np.ones(2, np.float32)}
  first = tx.init(params)
  _, state = tx.update(ones, first, params)
  # 0 / 0 in the optimiser: its update is not taken, and the gradients were good.
  _, after = tx.update({"w": np.zeros(2, np.float32)}, state._replace(inner_state=first.inner_state), params)
  assert not after.updates_finite
  assert int(after.good_steps) == 1
  _, after = tx.update({"w": np.full(2, np.nan, np.float32)}, first, params)
  assert not after.grads_finite
  assert after.updates_finite
