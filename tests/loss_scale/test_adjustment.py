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


FIELDS = [field.name for field in dataclasses.fields(mpjax.LossScaling)][1:]
# Values of these fields, in their order.
RULES = (
  (1024.0, 2.0, 0.5, 1, 128.0, 2.0**12, 1),
  (1024.0, 2.0, 0.25, 3, 0.25, 2.0**20, 2),
  (1024.0, 4.0, 0.5, 5, 1.0, 2.0**20, 2),
  (1000.0, 2.0, 0.5, 3, 300.0, 5000.0, 3),  # not powers of two
)


@pytest.mark.parametrize("row", RULES, ids=str)
def test_the_scale_follows_the_rules(row):
  rules = dict(zip(FIELDS, row, strict=True))
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
  assert states.good_steps.max() == min(rules["growth_interval"] - 1, 20)


# Preset to its library's first scale, growth interval and hysteresis.
PRESETS = {
  "grad_scaler": (2.0**16, 2000, 1),
  "megatron": (2.0**32, 1000, 2),
  "deepspeed": (2.0**16, 1000, 2),
  "keras": (2.0**15, 2000, 1),
  "jmp": (2.0**15, 2000, 1),
  "flax": (2.0**16, 2001, 1),
}


def test_every_preset_has_the_defaults_of_its_library_and_is_documented():
  page = (pathlib.Path(__file__).parents[2] / "docs" / "loss_scaling.md").read_text()
  assert set(_loss_scaling.PRESETS) == set(PRESETS)
  for name, defaults in PRESETS.items():
    assert f"`{name}`" in page, name
    assert f"`{name}`" in mpjax.LossScaling.preset.__doc__, name
    preset = mpjax.LossScaling.preset(name)
    assert (preset.init_scale, preset.growth_interval, preset.hysteresis) == defaults, name
    assert (preset.growth_factor, preset.backoff_factor) == (2, 0.5), name
    for loss_scaling in (name, {"preset": name}):
      assert mpjax.get_policy({"base": "fp16", "loss_scaling": loss_scaling}).loss_scaling == preset, name
    changed = mpjax.LossScaling.preset(name, growth_interval=7)
    assert changed == dataclasses.replace(preset, growth_interval=7), name
  with pytest.raises(ValueError, match=r"unknown loss scaling preset 'megatorn'.*did you mean 'megatron'"):
    mpjax.LossScaling.preset("megatorn")


STRING = "params=float32,compute=float16,output=float32"
# What `with_loss_scaling` takes, and the scale that it says.
SPECS = [
  ("dynamic", 2.0**16),
  (8, 8),
  ({"init_scale": 4.0}, 4),
  (mpjax.LossScaling(init_scale=2.0), 2),
  (mpjax.get_policy({"base": "fp16", "loss_scaling": {"init_scale": 32}}), 32),
  ("fp16", 2.0**16),
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
  ({"consecutive_hysteresis": True}, "key 'consecutive_hysteresis'.*leave it out: growth restores"),
  ("fp61", NEITHER + "fp16"),
  ("p=f32,c=f61", NEITHER + "f"),
  (np.zeros(1000), "loss_scaling=array.* of type ndarray"),
  (jmp.get_policy("half"), "loss_scaling=.* of type Policy"),
]


@pytest.mark.parametrize(("spec", "message"), NO_SPECS)
def test_what_is_no_loss_scaling_is_named_in_short(spec, message):
  with pytest.raises(ValueError, match=f"(?s){message}") as error:
    mpjax.with_loss_scaling(SGD, spec)
  assert len(str(error.value)) < 450 or isinstance(spec, str)


def test_swapped_arguments_are_named():
  with pytest.raises(TypeError, match=r"swapped: call mpjax.with_loss_scaling\(tx, loss_scaling\)"):
    mpjax.with_loss_scaling("dynamic", SGD)


def test_the_scale_stays_a_finite_power_of_two_at_both_bounds():
  for low, high in ((1.0, 2.0**24), (2.0**-126, 2.0**126)):
    tx = mpjax.dynamic_loss_scale(optax.identity(), growth_interval=1, min_scale=low, max_scale=high)
    found = run(tx, np.repeat([True, False], 300))[0].scale
    assert all(math.frexp(scale)[0] == 0.5 for scale in found)
    assert (found.min(), found.max(), found[-1]) == (low, high, low)
  # Zero gradients for ever do not make it infinite, and its reciprocal is not flushed to zero.
  tx = mpjax.with_loss_scaling(optax.identity(), {"preset": "grad_scaler", "growth_interval": 1})
  _, last = run(tx, np.asarray([True] * 200))
  updates, new = jax.jit(tx.update)({"g": F32(2.0**120)}, last)
  assert (float(updates["g"]), float(new.scale)) == (2.0**-6, 2.0**126)


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
