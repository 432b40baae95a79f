"""Loss scales of other libraries into mpjax's state and back, in the middle of a run."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import mpjax

PARAMS = {"w": np.asarray([1.0, 2.0], np.float32)}
BAD = {"w": np.asarray([np.nan, 2.0], np.float32)}
FINITE = np.random.default_rng(0).random(60) > 0.15
SGD = optax.sgd(0.1)


def torch_state(**changes):
  rules = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4, "_growth_tracker": 3}
  return {"scale": 2.0**12, **rules, **changes}


def scales_of(tx, state, finite_steps):
  step, out = jax.jit(tx.update), []
  for finite in finite_steps:
    _, state = step(PARAMS if finite else BAD, state, PARAMS)
    out.append(float(state.scale))
  return out, state


def jmp_scales(scale, finite_steps):
  for finite in finite_steps:
    scale = scale.adjust(jnp.asarray(finite))  # not under jit, where it forgets its lowest scale
    yield float(scale.loss_scale)


def flax_scales(scale, finite_steps):
  step = jax.jit(lambda scale, x: scale.value_and_grad(jnp.log)(x)[0])
  for finite in finite_steps:
    scale = step(scale, np.float32(1 if finite else np.nan))
    yield float(scale.scale)


def torch_scales(state, finite_steps):
  scale, tracker = state["scale"], state["_growth_tracker"]
  for finite in finite_steps:
    tracker = tracker + 1 if finite else 0
    if not finite:
      scale *= state["backoff_factor"]
    elif tracker == state["growth_interval"]:
      scale, tracker = scale * state["growth_factor"], 0
    yield scale


JMP = jmp.DynamicLossScale(np.float32(2.0**12), np.int32(3), period=4, min_loss_scale=np.float32(2.0**-4))
FLAX = DynamicScale(growth_interval=3, fin_steps=np.int32(3), scale=np.float32(2.0**12))
SOURCES = {"jmp": (JMP, jmp_scales), "flax": (FLAX, flax_scales), "torch": (torch_state(), torch_scales)}


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_goes_on_where_the_other_library_stopped_and_back(name):
  source, reference = SOURCES[name]
  inner = optax.trace(0.9)
  tx, state = mpjax.import_loss_scale(source, inner, optax.TraceState({"w": np.float32([5, 6])}))
  assert int(state.good_steps) == 3
  assert state.inner_state.trace["w"][1] == 6
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
  assert scales_of(tx, state, FINITE)[0] == list(reference(source, FINITE))
  scaling = {"growth_interval": 4, "min_scale": 2.0**-10}
  tx = mpjax.with_loss_scaling(SGD, scaling)
  _, state = scales_of(tx, tx.init(PARAMS), FINITE[:20])
  exported = mpjax.export_loss_scale(state, name, scaling=scaling)
  expected, _ = scales_of(tx, state, FINITE)
  assert list(reference(exported, FINITE)) == expected
  assert scales_of(*mpjax.import_loss_scale(exported, SGD, state.inner_state), FINITE)[0] == expected


def test_static_and_nested_scales():
  inner_state = SGD.init(PARAMS)
  tx, state = mpjax.import_loss_scale(jmp.StaticLossScale(np.float32(8)), SGD, inner_state)
  assert scales_of(tx, state, [True, False])[0] == [8, 8]
  assert isinstance(mpjax.export_loss_scale(state, "jmp", scaling=8), jmp.StaticLossScale)
  _, state = mpjax.import_loss_scale(jmp.NoOpLossScale(), SGD, inner_state)
  assert float(state.scale) == 1
  nested = optax.chain(optax.identity(), mpjax.dynamic_loss_scale(SGD)).init(PARAMS)
  exported = mpjax.export_loss_scale(nested, "torch", scaling="dynamic")
  assert exported == torch_state(scale=2.0**16, growth_interval=2000, _growth_tracker=0)


def test_what_cannot_be_converted_is_named():
  for source, error, match in [
    ({}, ValueError, "disabled"),
    ({"scale": 1.0}, ValueError, r"growth_factor, backoff_factor, growth_interval, _growth_tracker missing"),
    (torch_state(scale=float("inf")), ValueError, r"^scale=inf"),
    (torch_state(scale=2.0**127), ValueError, r"^scale="),
    (torch_state(growth_interval=0), ValueError, "growth_interval=0"),
    (torch_state(growth_factor=1.0), ValueError, "growth_factor=1"),
    (torch_state(_growth_tracker=-5), ValueError, "_growth_tracker=-5"),
    (torch_state(_growth_tracker=None), ValueError, "_growth_tracker=None"),
    (3.0, TypeError, "float"),
  ]:
    with pytest.raises(error, match=match):
      mpjax.import_loss_scale(source, SGD, optax.EmptyState())
  for to, scaling, match in [
    ("keras", "dynamic", "jmp, flax, torch"),
    ("torch", "megatron", "hysteresis=2"),
    ("jmp", {"backoff_factor": 0.25}, "backoff_factor=0.25"),
    ("jmp", {"growth_factor": 1.5, "backoff_factor": 2 / 3}, "growth_factor=1.5"),
    ("flax", 8, "no static loss scale"),
    ("torch", None, "nothing to export"),
  ]:
    state = mpjax.with_loss_scaling(SGD, scaling or "dynamic").init(PARAMS)
    with pytest.raises(ValueError, match=match):
      mpjax.export_loss_scale(state, to, scaling=scaling)
