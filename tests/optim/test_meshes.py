"""Codes, corrections and noise do not depend on the mesh, and cost no collective."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from tests.optim._forms import FORMS, same_bits

pytestmark = pytest.mark.optimised

KEY = jax.random.key(0)
SHAPES = {"w": (8, 16, 1024), "b": (2048,)}
ALL = FORMS | {
  "lean, stochastic": (
    lambda tx: mpjax.master_weights(mpjax.quantized_state(tx, "bfloat16"), "stochastic"),
    jnp.bfloat16,
  )
}
COLLECTIVE = re.compile(
  r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def division(by):
  """Returns how an array is divided over 8 devices, by its shape."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

  def sharding(shape):
    dimension = {"rows": 0, "columns": len(shape) - 1}[by]
    if len(shape) < 2 or shape[dimension] % 8:
      return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, "x"))

  return sharding


def step_of(tx):
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def values(dtype, scale=1.0):
  keys = jax.random.split(KEY, len(SHAPES))
  return {
    name: (scale * jax.random.normal(key, shape)).astype(dtype)
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
  }


QUICK = ("int8", "weights int16", "lean", "lean, stochastic")


@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize(
  "form", [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in ALL if form not in QUICK)]
)
def test_eight_devices_have_the_bits_of_one_and_move_none(form, by):
  wrap, dtype = ALL[form]
  tx = wrap(optax.adamw(0.1))
  place = division(by)
  put = lambda tree: jax.tree.map(lambda x: jax.device_put(x, place(x.shape)), tree)
  params, grads = values(dtype), values(jnp.float32, 1e-3)
  state = tx.init(params)
  divided = put((params, state, grads))
  shardings = jax.tree.map(lambda x: x.sharding, divided)
  compiled = jax.jit(step_of(tx), out_shardings=shardings[:2]).lower(*divided).compile()
  assert not COLLECTIVE.findall(compiled.as_text())
  one = jax.jit(step_of(tx))
  there, state_there = divided[:2]
  for _ in range(3):
    params, state = one(params, state, grads)
    there, state_there = compiled(there, state_there, divided[2])
  same_bits((there, state_there), (params, state))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_axes_may_be_explicit(dtype):
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  specs = {"w": ("x", "y"), "both": (None, ("x", "y")), "uneven": ("x", "y"), "s": (), "b": ("y",)}
  shapes = {"w": (16, 512), "both": (3, 1024), "uneven": (8, 300), "s": (), "b": (8,)}
  params = {name: jax.random.normal(KEY, shape) for name, shape in shapes.items()}
  place = lambda name: NamedSharding(mesh, PartitionSpec(*specs[name]))
  divided = {name: jax.device_put(x, place(name)) for name, x in params.items()}
  tx = mpjax.quantized_state(optax.sgd(0.1, momentum=0.9), dtype, min_size=0)
  states = []
  for p in (params, divided):
    state = tx.init(p)
    for _ in range(2):
      _, state = jax.jit(tx.update)(p, state, p)
    states.append(state)
  same_bits(states[1], states[0])
  for name, trace in states[1].inner_state[0].trace.items():
    assert trace.codes.sharding.is_equivalent_to(place(name), len(shapes[name]))


def test_the_first_state_is_divided_as_the_parameters():
  place = division("columns")
  tx = mpjax.quantized_state(optax.adamw(0.1))
  params = {name: jax.device_put(x, place(x.shape)) for name, x in values(jnp.float32).items()}
  state = tx.init(params)
  _, state = jax.jit(tx.update)(params, state, params)
  codes = state.inner_state[0].nu["w"].codes
  assert codes.dtype == jnp.int8
  assert codes.sharding.is_equivalent_to(params["w"].sharding, 3)
