"""A small model, and what an inspection of it has to find, computed without mpjax.numerics's passes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import mpjax
from mpjax.numerics._tensors import Magnitudes, full_summary

WIDTH, ROWS = 16, 16  # FP8 products take multiples of 16
_FP8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}

POLICIES = {
  "fp32": "fp32",
  "bf16": "bf16",
  "fp16": "fp16",
  "float16": "float16",
  "bf16_pure": "bf16_pure",
  "fp8": {"base": "fp8", "fp8": _FP8},
}
AS_ROUNDED = {"xla_allow_excess_precision": False}


def normal(seed, *shape, scale=1.0):
  return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def params_of(seed=0):
  return {
    "one": {"w": normal(seed, WIDTH, WIDTH, scale=0.25), "b": normal(seed + 1, WIDTH, scale=0.1)},
    "two": {"w": normal(seed + 2, WIDTH, WIDTH, scale=0.25)},
  }


def batch_of(seed=10, rows=ROWS):
  return {"x": normal(seed, rows, WIDTH), "y": normal(seed + 1, rows, WIDTH)}


def mlp(params, batch, taps=()):
  """The loss, and the activations that are looked at; what is added to them has their gradients."""
  tap = lambda x, i: x + taps[i] if taps else x
  x = batch["x"].astype(params["one"]["w"].dtype)
  with jax.named_scope("one"):
    z = tap(x @ params["one"]["w"], 0)
    h = tap(jnp.tanh(z + params["one"]["b"]), 1)
  with jax.named_scope("two"):
    out = tap(h @ params["two"]["w"], 2)
  return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2), (z, h, out)


def loss_fn(params, batch):
  return mlp(params, batch)[0]


ACTIVATIONS = [("one", "dot_general"), ("one", "tanh"), ("two", "dot_general")]


@functools.cache
def report_of(policy, **options):
  tx = optax.sgd(1e-2)
  return mpjax.inspect_numerics(
    loss_fn, params_of(), batch_of(), POLICIES[policy], tx=tx, advise=False, title="mlp", pieces=1, **options
  )


def by_hand(policy):
  """Loss, activations, their gradients and those of parameters: of the policy's own run."""
  policy = mpjax.get_policy(policy)
  params, batch = policy.cast_to_param(params_of()), batch_of()
  fun = mlp
  if policy.autocast:
    fun = mpjax.autocast(mlp, policy)
  else:
    params, batch = policy.cast_to_compute((params, batch))
  scale = policy.loss_scaling.init_scale if policy.loss_scaling else 1.0

  def scaled(params, taps):
    loss, activations = fun(params, batch, taps)
    return loss.astype(jnp.float32) * scale, (loss, activations)

  dtype = jnp.float32 if policy.autocast else policy.compute_dtype
  taps = [jnp.zeros((ROWS, WIDTH), dtype)] * 3
  run = jax.jit(jax.grad(scaled, (0, 1), has_aux=True), compiler_options=AS_ROUNDED)
  (grads, of_taps), (loss, activations) = run(params, taps)
  unscale = lambda tree: jax.tree.map(lambda g: np.asarray(g, np.float32) / scale, tree)
  return float(loss), jax.tree.map(np.asarray, activations), unscale(of_taps), unscale(grads)


def tensors_by_hand(policy):
  """By (kind, module, name): the values."""
  loss, activations, of_taps, grads = by_hand(policy)
  found = {}
  for (module, name), value, gradient in zip(ACTIVATIONS, activations, of_taps, strict=True):
    found["activation", module, name] = np.asarray(value, np.float32)
    found["activation gradient", module, name] = gradient
  for module, leaves in grads.items():
    for name, gradient in leaves.items():
      found["weight gradient", module, name] = gradient
      found["parameter", module, name] = np.asarray(params_of()[module][name])
  return loss, found


def magnitudes_of(x, scale=1.0):
  summary = full_summary(scale)
  return Magnitudes.of(summary, np.asarray(summary(jnp.asarray(x))))


def shares_by_hand(x, name, scale):
  with np.errstate(over="ignore"):
    rounded = (x * np.float32(scale)).astype(ml_dtypes.finfo(name).dtype).astype(np.float32)
  tiny = float(ml_dtypes.finfo(name).smallest_normal)
  gone, over = (x != 0) & (rounded == 0), ~np.isfinite(rounded)
  small = (rounded != 0) & ~over & (np.abs(rounded) < tiny)
  return gone.mean(), small.mean(), over.mean()


def near_counts(got, want, fraction=0.02):
  """Whether two histograms agree but for values that float32's rounding takes over an edge."""
  moved = np.abs(np.cumsum(got.histogram[1]) - np.cumsum(want.histogram[1])).max()
  return got.count == want.count and moved <= max(1, fraction * want.count)


def scaled_policy(scale):
  return {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": scale}}
