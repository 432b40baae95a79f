"""`linear_cross_entropy` on 8 devices: rows and vocabulary divided, under GSPMD and a training step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpjax
from tests.casting._jaxprs import jit

ROWS, LENGTH, D, V = 8, 32, 16, 320
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, LENGTH, D)).astype(np.float32)
KERNEL = RNG.normal(size=(D, V)).astype(np.float32) / 2
BIAS = RNG.normal(size=V).astype(np.float32)
LABELS = RNG.integers(0, V, (ROWS, LENGTH)).astype(np.int32)
SPECS = (P("data"), P(None, "tensor"), P("tensor"), P("data"))
MOST = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 5e-3}


def loss(x, kernel, bias, labels):
  return mpjax.linear_cross_entropy(x, kernel, labels, bias=bias, rows=64)


def gradients(policy="fp32"):
  return jax.value_and_grad(mpjax.autocast(loss, policy), (0, 1, 2))


@functools.cache
def on_one_device():
  return jax.device_get(jit(gradients())(X, KERNEL, BIAS, LABELS))


def put(kind):
  """A mesh with axes of a kind, and the arguments on it."""
  on = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)
  pairs = zip((X, KERNEL, BIAS, LABELS), SPECS, strict=True)
  return on, [jax.device_put(a, NamedSharding(on, s)) for a, s in pairs]


def assert_same(got, most):
  for a, b in zip(*map(jax.tree.leaves, (got, on_one_device())), strict=True):
    assert np.linalg.norm(a - b) <= most * np.linalg.norm(b)


def gathered(compiled):
  """What crosses devices other than as a sum or a maximum."""
  return re.findall(r"= .* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(.*", compiled.as_text())


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_divided_vocabulary_is_never_gathered(policy):
  on, args = put(AxisType.Auto)
  out = (NamedSharding(on, P()), tuple(NamedSharding(on, s) for s in SPECS[:3]))
  compiled = jax.jit(gradients(policy), out_shardings=out).lower(*args).compile()
  assert not gathered(compiled)
  assert_same(compiled(*args), MOST[policy])


def test_a_divided_training_step_has_the_losses_of_whole_logits():
  params = {"up": RNG.normal(size=(D, D)).astype(np.float32), "head": KERNEL}
  batch = {"x": X, "y": LABELS}

  def plain(p, batch):
    logits = jnp.tanh(batch["x"] @ p["up"]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()

  def in_chunks(p, batch):
    return mpjax.linear_cross_entropy(jnp.tanh(batch["x"] @ p["up"]), p["head"], batch["y"], rows=16)

  def losses(loss_fn, **options):
    step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), policy="bf16", **options)
    state, out = step.init(params), []
    for _ in range(3):
      state, metrics = step(state, batch)
      out.append(float(metrics["loss"]))
    return out

  on = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
  rules = {"head": ("fsdp", "tensor"), "up": ("fsdp", None)}
  usual = losses(plain)
  divided = {"mesh": on, "sharding": rules}
  for options in ({}, divided, {**divided, "gather": "block", "accumulate": 2}):
    np.testing.assert_allclose(losses(in_chunks, **options), usual, rtol=1e-3)
