"""A small model, and what an inspection of it has to find, computed without mpjax.numerics's passes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import mpjax

# Histograms that a report has to have, of arrays that are not in one.
from mpjax.numerics._seen import see

WIDTH, ROWS = 16, 16  # FP8 products take multiples of 16
_FP8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}
POLICIES = {
  "fp32": "fp32",
  "bf16": "bf16",
  "fp16": "fp16",
  "bf16_pure": "bf16_pure",
  "fp8": {"base": "fp8", "fp8": _FP8},
}
TX = optax.sgd(1e-2)


def normal(seed, *shape, scale=1.0):
  return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


PARAMS = {
  "one": {"w": normal(0, WIDTH, WIDTH, scale=0.25), "b": normal(1, WIDTH, scale=0.1)},
  "two": {"w": normal(2, WIDTH, WIDTH, scale=0.25)},
}


def batch_of(seed=10, rows=ROWS):
  return {"x": normal(seed, rows, WIDTH), "y": normal(seed + 1, rows, WIDTH)}


BATCH = batch_of()


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


def look(policy, batches=BATCH, loss=loss_fn, **options):
  return mpjax.inspect_numerics(loss, PARAMS, batches, policy=policy, **{"tx": TX, **options})


@functools.cache
def report_of(policy):
  return look(POLICIES[policy], title="mlp")


@functools.cache
def by_hand(policy):
  """The loss, and tensors by (kind, module, name), of the policy's own run."""
  policy = mpjax.get_policy(POLICIES[policy])
  params, batch, fun = policy.cast_to_param(PARAMS), BATCH, mlp
  if policy.autocast:
    fun = mpjax.autocast(mlp, policy)
  else:
    params, batch = policy.cast_to_compute((params, batch))
  scale = policy.loss_scaling.init_scale if policy.loss_scaling else 1.0

  def scaled(params, taps):
    loss, activations = fun(params, batch, taps)
    return loss.astype(jnp.float32) * scale, (loss, activations)

  dtype = jnp.float32 if policy.autocast else policy.compute_dtype
  run = jax.jit(
    jax.grad(scaled, (0, 1), has_aux=True), compiler_options={"xla_allow_excess_precision": False}
  )
  (grads, of_taps), (loss, activations) = run(params, [np.zeros((ROWS, WIDTH), dtype)] * 3)
  wide = lambda x: np.asarray(x, np.float32)
  found = {}
  for place, value, gradient in zip(ACTIVATIONS, activations, of_taps, strict=True):
    found["activation", *place] = wide(value)
    found["activation gradient", *place] = wide(gradient) / scale
  for module, leaves in grads.items():
    for name, gradient in leaves.items():
      found["weight gradient", module, name] = wide(gradient) / scale
      found["parameter", module, name] = PARAMS[module][name]
  return float(loss), found


def magnitudes_of(x):
  return jax.device_get(see(jnp.asarray(x)))


def same(a, b):
  return np.array_equal(a.exponents, b.exponents) and (a.nan, a.top) == (b.nan, b.top)


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


def at_scale(state, scale):
  """The state of a step at another loss scale, for which no program is compiled anew."""
  return state.replace(opt_state=state.opt_state._replace(scale=np.float32(scale)))
