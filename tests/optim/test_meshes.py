"""Codes, corrections and noise do not depend on the mesh, and cost no collective."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from tests.optim._forms import FORMS, normal, same_bits

pytestmark = pytest.mark.optimised

COLLECTIVE = re.compile(
  r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def divided(tree):
  """Divides the last dimension of a tree's arrays of two or more over 8 devices."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  spec = lambda x: (
    PartitionSpec(*[None] * (x.ndim - 1), "x") if x.ndim > 1 and not x.shape[-1] % 8 else PartitionSpec()
  )
  return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def values(dtype, scale=1.0):
  return {"w": (scale * normal(8, 16, 1024)).astype(dtype), "b": (scale * normal(2048, seed=1)).astype(dtype)}


@pytest.mark.parametrize("form", ["lean", "weights stochastic"])
def test_eight_devices_have_the_bits_of_one_and_move_none(form):
  wrap, dtype = FORMS[form]
  tx = wrap(optax.adamw(0.1))

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, grads = values(dtype), values(jnp.float32, 1e-3)
  one = (params, tx.init(params))
  *there, grads_there = divided((*one, grads))
  shardings = jax.tree.map(lambda x: x.sharding, tuple(there))
  compiled = jax.jit(step, out_shardings=shardings).lower(*there, grads_there).compile()
  assert not COLLECTIVE.findall(compiled.as_text())
  alone = jax.jit(step)
  for _ in range(3):
    one = alone(*one, grads)
    there = compiled(*there, grads_there)
  same_bits(there, one)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_axes_may_be_explicit(dtype):
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  # Name to (shape, axes).
  leaves = {
    "w": ((16, 512), ("x", "y")),
    "both": ((3, 1024), (None, ("x", "y"))),
    "uneven": ((8, 300), ("x", "y")),
    "s": ((), ()),
    "b": ((8,), ("y",)),
  }
  # Outside of jit, too, where a key is made beside what is divided; which takes a program for each operation.
  is_eager = dtype == "bfloat16"
  leaves = {name: leaf for name, leaf in leaves.items() if not is_eager or name in ("w", "s")}
  place = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, (_, axes) in leaves.items()}
  params = {name: normal(*shape) for name, (shape, _) in leaves.items()}
  tx = mpjax.quantized_state(optax.sgd(0.1, momentum=0.9), dtype, min_size=0)
  states = []
  for p, around in ((params, contextlib.nullcontext()), (jax.device_put(params, place), jax.set_mesh(mesh))):
    with around:
      state, update = (tx.init if is_eager else jax.jit(tx.init))(p), jax.jit(tx.update)
    for _ in range(2):
      _, state = update(p, state, p)
    states.append(state)
  same_bits(states[1], states[0])
  for name, trace in states[1].inner_state[0].trace.items():
    assert trace.codes.sharding.is_equivalent_to(place[name], np.ndim(params[name]))
