"""Training steps of the suite `overhead`: by hand, by other libraries and by mpjax.

Libraries that cast by themselves are given a plain float32 model; by hand it has linen's `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import mpx
import mpx._cast
import mpx._dtypes
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax
from benchmarks._transformers import Task, gpt

TX = optax.adamw(1e-3)
SCALE, PERIOD = 2.0**15, 2000
POLICIES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
HAND = "hand-written"
Loss = Callable[[Any, Any], jax.Array]
# Makes a state of parameters, and takes a step: (state, batch) -> (state, loss or metrics).
Variant = tuple[Callable[[Any], Any], Any]


class Perceptron(nn.Module):
  """Three layers with ReLU."""

  width: int
  classes: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for _ in range(2):
      x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
    return nn.Dense(self.classes, dtype=self.dtype)(x)


# Models, and how many steps are timed at once.
MODELS: dict[str, tuple[Task, int]] = {
  "transformer": (gpt(256, 4, 4, seq=128, batch=8), 1),
  "few tokens": (gpt(512, 8, 4, seq=32, batch=1), 3),
  "tiny perceptron": (
    Task(
      Perceptron(64, 10),
      jax.ShapeDtypeStruct((64, 32), jnp.float32),
      jax.ShapeDtypeStruct((64,), jnp.int32),
    ),
    200,
  ),
}


def batch_of(model: str) -> dict[str, jax.Array]:
  """A batch of random inputs and labels."""
  task, rng = MODELS[model][0], np.random.default_rng(0)
  draw = lambda s: rng.normal(size=s.shape) if s.dtype == jnp.float32 else rng.integers(0, 10, s.shape)
  return {name: jnp.asarray(draw(s), s.dtype) for name, s in (("x", task.x), ("y", task.y))}


def variants(model: str, dtype: str) -> dict[str, Variant]:
  """The steps of a model in a compute dtype, by name; the first has no loss scale.

  All have one loss and one optimiser, are jitted and donate their state.
  """
  task, half = MODELS[model][0], jnp.dtype(dtype)
  loss, by_hand = task.loss(), task.loss(None if dtype == "float32" else half)
  steps = {HAND: bare(by_hand)}
  if dtype == "bfloat16":
    steps["jmp"] = bare(jmp_casts(loss, half))
  else:
    steps["hand-written loss scale"] = scaled_by_hand(by_hand)
    steps["flax DynamicScale"] = with_flax(by_hand)
    steps["jmp"] = with_jmp(loss, half)
  steps["mpx"] = with_mpx(loss, half)
  if dtype == "float32":
    steps["optax.apply_if_finite (no scale)"] = bare(loss, optax.apply_if_finite(TX, 5))
  if dtype == "float16":
    steps["mpjax.autocast, dynamic_loss_scale"] = with_mpjax(mpjax.autocast(loss, "fp16"))
  found: dict[str, Variant] = {}
  for name, (init, step) in steps.items():
    found[name] = init, jax.jit(step, donate_argnums=0)
  policies: dict[str, Any] = {POLICIES[dtype]: POLICIES[dtype]}
  if dtype == "float32":
    policies["fp32, dynamic"] = {"base": "fp32", "loss_scaling": "dynamic"}
  for name, policy in policies.items():
    whole = mpjax.make_train_step(loss, TX, policy)
    found[f"mpjax.make_train_step {name}"] = whole.init, whole.jitted
  return found


def bare(loss: Loss, tx: optax.GradientTransformation = TX) -> Variant:
  """A step without a loss scale."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, tx.init(params)), step


def scaled_by_hand(loss: Loss) -> Variant:
  """What tutorials write: scale, unscale, look at every gradient, keep the old state by `where`."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (scale, good) = state
    value, grads = jax.value_and_grad(lambda p: loss(p, batch) * scale)(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    kept = _updated(finite, grads, params, opt_state)
    grow = finite & (good + 1 >= PERIOD)
    scaled = jnp.where(grow, scale * 2, jnp.where(finite, scale, jnp.maximum(scale / 2, 1)))
    return (*kept, (scaled, jnp.where(finite & ~grow, good + 1, 0))), value / scale

  return lambda params: (params, TX.init(params), (jnp.float32(SCALE), jnp.int32(0))), step


def with_flax(loss: Loss) -> Variant:
  """The loss scale of flax."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, scale = state
    scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
    return (*_updated(finite, grads, params, opt_state), scale), value

  return lambda params: (params, TX.init(params), DynamicScale(scale=SCALE)), step


def jmp_casts(loss: Loss, dtype: Any) -> Loss:
  """A loss under a policy of jmp."""
  policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
  return lambda params, batch: loss(*policy.cast_to_compute((params, batch)))


def with_jmp(loss: Loss, dtype: Any) -> Variant:
  """The casts and the loss scale of jmp."""
  loss = jmp_casts(loss, dtype)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, leaves = state  # a jmp scale as an argument cannot be lowered ahead of time
    scale = jmp.DynamicLossScale(*leaves)
    value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, batch)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    adjusted = scale.adjust(finite)
    kept = _updated(finite, grads, params, opt_state, jmp.select_tree)
    return (*kept, (adjusted.loss_scale, adjusted.counter)), scale.unscale(value)

  return lambda params: (params, TX.init(params), (jnp.float32(SCALE), jnp.int32(0))), step


def with_mpx(loss: Loss, dtype: Any) -> Variant:
  """The casts and the loss scale of mpx, which always scales."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (value, least, counter) = state
    # set_half_precision_datatype("bfloat16") of mpx 0.1.8 changes nothing.
    mpx._dtypes.HALF_PRECISION_DATATYPE = dtype
    scale = mpx.DynamicLossScaling(value, least, factor=2, period=PERIOD, counter=counter)
    loss_value, scale, finite, grads = mpx.filter_value_and_grad(loss, scale)(params, batch)
    params, opt_state = mpx.optimizer_update(params, TX, opt_state, grads, finite)
    return (params, opt_state, (scale.loss_scaling, scale.min_loss_scaling, scale.counter)), loss_value

  scale = jnp.float32(SCALE), jnp.float32(1), jnp.int32(0)
  return lambda params: (params, TX.init(params), scale), step


def with_mpjax(loss: Loss) -> Variant:
  """The loss scale of mpjax in a step of one's own."""
  scaled = mpjax.dynamic_loss_scale(TX, init_scale=SCALE)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state

    def scaled_loss(params: Any) -> Any:
      value = loss(params, batch)
      return mpjax.scale_loss(value, opt_state), value

    (_, value), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    updates, opt_state = scaled.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, scaled.init(params)), step


def _where(finite: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def _updated(finite: jax.Array, grads: Any, params: Any, opt_state: Any, select: Any = _where) -> Any:
  """Parameters and state of the optimiser after finite gradients, else as they were."""
  updates, new = TX.update(grads, opt_state, params)
  return select(finite, (optax.apply_updates(params, updates), new), (params, opt_state))
