"""Steps under a `jax.jit` of the user's own, whose parameters the compiler gathers (GSPMD)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from tests.planner._steps import F32, S, described, mesh_of, on

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
  mesh, tx = mesh_of(fsdp=16), optax.sgd(0.1)
  weight = lambda *shape: on(mesh, S(shape, F32), None, "fsdp")
  params = {"gate": weight(LAYERS, DIM, HIDDEN), "down": weight(LAYERS, HIDDEN, DIM)}

  @jax.jit
  def step(params, batch):
    updates, _ = tx.update(jax.grad(loss_fn)(params, batch), tx.init(params))
    return optax.apply_updates(params, updates)

  return mpjax.plan(
    step, params, on(mesh, S((256, 128, DIM), F32), "fsdp"), target="v5e:4x4", compile=compile
  )


def gathered(plan, dtype):
  """Bytes of a compiled step's all-gathers of a dtype."""
  found = [c.nbytes for c in plan.collectives if (c.operation, c.dtype) == ("all-gather", dtype)]
  return sum(found)


@pytest.mark.aot
@pytest.mark.slow
def test_autocast_gathers_in_bfloat16_as_casts_by_hand_do():
  described("v5e:4x4")
  expected, found = (planned(fun, compile=True) for fun in (by_hand, mpjax.autocast(loss, "bf16")))
  copies = LAYERS * DIM * HIDDEN * 2 * 2  # of both matrices in bfloat16
  assert gathered(expected, "bfloat16") >= 2 * copies  # forward, and again in the backward pass
  assert gathered(found, "bfloat16") == gathered(expected, "bfloat16")
  assert gathered(found, "float32") <= gathered(expected, "float32")


def test_a_plan_without_the_compiler_has_the_weights_that_it_gathers():
  """And gradients that are whole before they are reduced: of a layer at a time, in a scan."""
  step = planned(loss, compile=False)
  weights = LAYERS * DIM * HIDDEN * 4 * 2
  assert step.memory.parts["master weights"] == weights // 16
  rows = 256 * 128 // 16 * DIM * 4
  assert step.memory.peak > weights // 16 + DIM * HIDDEN * 4 + rows * LAYERS
