"""Steps under a `jax.jit` of the user's own, whose parameters the compiler gathers (GSPMD)."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import get_target, missing

TARGET = "v5e:4x4"
LAYERS, DIM, HIDDEN = 4, 512, 1024


def block(x, w, cast):
  h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
  return x + (jax.nn.silu(cast(h) @ cast(w["gate"])) @ cast(w["down"])).astype(jnp.float32)


def loss(params, batch, cast=lambda x: x):
  step = lambda x, w: (block(x, w, cast), None)
  x, _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), batch, params)
  return jnp.mean(x**2)


def by_hand(params, batch):
  return loss(params, batch, lambda x: x.astype(jnp.bfloat16))


def planned(loss_fn, compile):
  """The plan of a step of a model that is divided over 16 devices."""
  mesh = AbstractMesh((16,), ("fsdp",), axis_types=(AxisType.Auto,))
  on = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )
  params = {"gate": on((LAYERS, DIM, HIDDEN), None, "fsdp"), "down": on((LAYERS, HIDDEN, DIM), None, "fsdp")}
  tx = optax.sgd(0.1)

  @jax.jit
  def step(params, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, _ = tx.update(grads, tx.init(params))
    return optax.apply_updates(params, updates)

  return mpjax.plan(step, (params, on((256, 128, DIM), "fsdp")), target=TARGET, compile=compile)


def gathered(plan):
  """Bytes of a compiled step's all-gathers by dtype."""
  bytes_by_dtype = {}
  for found in plan.collectives:
    if found.operation == "all-gather":
      bytes_by_dtype[found.dtype] = bytes_by_dtype.get(found.dtype, 0) + found.nbytes
  return bytes_by_dtype


@pytest.mark.aot
@pytest.mark.slow
def test_autocast_gathers_in_bfloat16_as_casts_by_hand_do():
  if lacks := missing(get_target(TARGET)):
    pytest.skip(lacks)
  expected, found = (gathered(planned(fun, compile=True)) for fun in (by_hand, mpjax.autocast(loss, "bf16")))
  copies = LAYERS * DIM * HIDDEN * 2 * 2  # of both matrices in bfloat16
  assert expected["bfloat16"] >= 2 * copies  # forward, and again in the backward pass
  assert found["bfloat16"] == expected["bfloat16"]
  assert found.get("float32", 0) <= expected.get("float32", 0)


def test_a_plan_without_the_compiler_has_the_weights_that_it_gathers():
  """And gradients that are whole before they are reduced: of a layer at a time, in a scan."""
  step = planned(loss, compile=False)
  weights = LAYERS * DIM * HIDDEN * 4 * 2
  assert step.memory.parts["master weights"] == weights // 16
  rows = 256 * 128 // 16 * DIM * 4
  assert step.memory.peak > weights // 16 + DIM * HIDDEN * 4 + rows * LAYERS


def test_activations_with_the_shape_of_a_weight_are_none():
  mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
  on = lambda rows, *spec: jax.ShapeDtypeStruct(
    (rows, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )

  def temporaries(rows, **specs):
    params = {name: on(1024, *spec) for name, spec in specs.items()}
    square = lambda params, x: jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)
    plan = mpjax.plan(jax.jit(jax.grad(square)), (params, on(rows, "fsdp")), target="h100:8", compile=False)
    return plan.memory.peak - plan.memory.parts["batch"] - plan.memory.parts["master weights"]

  divided = temporaries(1008, a=("fsdp",), b=("fsdp",))
  assert temporaries(1024, a=("fsdp",), b=("fsdp",)) < 1.1 * divided
  whole = 1024 * 1024 * 4
  assert temporaries(16, a=(), b=("fsdp",)) > whole
