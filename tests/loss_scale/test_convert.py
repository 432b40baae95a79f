"""Loss scales of other libraries into mpjax's state and back, in the middle of a run."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import mpjax

PARAMS = {"w": jnp.asarray([1.0, 2.0])}
FINITE = np.random.default_rng(0).random(60) > 0.15


def torch_state(**changes):
  state = {
    "scale": 2.0**12,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 4,
    "_growth_tracker": 3,
  }
  return {**state, **changes}


def scales_of(tx, state, finite_steps):
  out = []
  for finite in finite_steps:
    _, state = tx.update({"w": jnp.where(finite, PARAMS["w"], jnp.nan)}, state, PARAMS)
    out.append(float(state.scale))
  return out, state


def jmp_scales(scale, finite_steps):
  for finite in finite_steps:
    scale = scale.adjust(jnp.asarray(finite))
    yield float(scale.loss_scale)


def flax_scales(scale, finite_steps):
  step = jax.jit(lambda scale, x: scale.value_and_grad(jnp.log)(x)[0])
  for finite in finite_steps:
    scale = step(scale, jnp.where(finite, 1.0, jnp.nan))
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


SOURCES = {
  "jmp": (
    jmp.DynamicLossScale(jnp.float32(2.0**12), jnp.int32(3), period=4, min_loss_scale=jnp.float32(2.0**-4)),
    jmp_scales,
  ),
  "flax": (DynamicScale(growth_interval=3, fin_steps=jnp.int32(3), scale=jnp.float32(2.0**12)), flax_scales),
  "torch": (torch_state(), torch_scales),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_goes_on_where_the_other_library_stopped(name):
  source, reference = SOURCES[name]
  inner = optax.adam(0.1)
  inner_state = inner.init(PARAMS)
  _, inner_state = inner.update(PARAMS, inner_state, PARAMS)
  tx, state = mpjax.import_loss_scale(source, inner, inner_state)
  assert int(state.good_steps) == 3
  assert int(state.inner_state[0].count) == 1
  scales, _ = scales_of(tx, state, FINITE)
  assert scales == list(reference(source, FINITE))
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))


@pytest.mark.parametrize("name", SOURCES)
def test_there_and_back_gives_the_same_scales(name):
  _, reference = SOURCES[name]
  scaling = {"growth_interval": 4, "min_scale": 2.0**-10}
  tx = mpjax.with_loss_scaling(optax.sgd(0.1), scaling)
  _, state = scales_of(tx, tx.init(PARAMS), FINITE[:20])
  exported = mpjax.export_loss_scale(state, name, scaling=scaling)
  expected, _ = scales_of(tx, state, FINITE)
  assert list(reference(exported, FINITE)) == expected
  again, imported = mpjax.import_loss_scale(exported, optax.sgd(0.1), state.inner_state)
  assert scales_of(again, imported, FINITE)[0] == expected


def test_static_scales():
  inner = optax.sgd(0.1)
  tx, state = mpjax.import_loss_scale(jmp.StaticLossScale(jnp.float32(8)), inner, inner.init(PARAMS))
  assert scales_of(tx, state, [True, False])[0] == [8, 8]
  assert isinstance(mpjax.export_loss_scale(state, "jmp", scaling=8), jmp.StaticLossScale)
  _, state = mpjax.import_loss_scale(jmp.NoOpLossScale(), inner, inner.init(PARAMS))
  assert float(state.scale) == 1


def test_a_scale_nested_in_other_states_is_exported():
  tx = optax.chain(optax.identity(), mpjax.dynamic_loss_scale(optax.sgd(0.1)))
  exported = mpjax.export_loss_scale(tx.init(PARAMS), "torch", scaling="dynamic")
  assert exported == torch_state(scale=2.0**16, growth_interval=2000, _growth_tracker=0)


@pytest.mark.parametrize(
  ("source", "error", "match"),
  [
    ({}, ValueError, "disabled"),
    ({"scale": 1.0}, ValueError, r"growth_factor, backoff_factor, growth_interval, _growth_tracker missing"),
    (torch_state(scale=float("inf")), ValueError, r"^scale=inf"),
    (torch_state(scale=2.0**127), ValueError, r"^scale="),
    (torch_state(growth_interval=0), ValueError, "growth_interval=0"),
    (torch_state(growth_factor=1.0), ValueError, "growth_factor=1"),
    (torch_state(_growth_tracker=-5), ValueError, "_growth_tracker=-5"),
    (torch_state(_growth_tracker=None), ValueError, "_growth_tracker=None"),
    (3.0, TypeError, "float"),
  ],
)
def test_what_cannot_be_imported_is_named(source, error, match):
  with pytest.raises(error, match=match):
    mpjax.import_loss_scale(source, optax.sgd(0.1), optax.EmptyState())


@pytest.mark.parametrize(
  ("to", "scaling", "match"),
  [
    ("keras", "dynamic", "jmp, flax, torch"),
    ("torch", "megatron", "hysteresis=2"),
    ("jmp", {"backoff_factor": 0.25}, "backoff_factor=0.25"),
    ("jmp", {"growth_factor": 1.5, "backoff_factor": 2 / 3}, "growth_factor=1.5"),
    ("flax", 8, "no static loss scale"),
    ("torch", None, "nothing to export"),
  ],
)
def test_what_the_other_library_cannot_express_is_named(to, scaling, match):
  state = mpjax.with_loss_scaling(optax.sgd(0.1), scaling or "dynamic").init(PARAMS)
  with pytest.raises(ValueError, match=match):
    mpjax.export_loss_scale(state, to, scaling=scaling)
