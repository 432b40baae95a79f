"""Steps of the overhead suite: one loss and one optimiser, by hand, by other libraries and by mpjax.

Every variant is `(params -> state, jitted (state, batch) -> (state, loss))` with its state donated. The first
of each dtype is the hand-written step without a loss scale, which the others are divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import mpx
import mpx._cast
import mpx._dtypes
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax
from benchmarks.overhead._models import Model

Variant = tuple[Callable[[Any], Any], Any]
TX = optax.adamw(1e-3)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
POLICIES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KERAS = {
  "float32": ("Keras float32", "float32"),
  "bfloat16": ("Keras mixed_bfloat16", "mixed_bfloat16"),
  "float16": ("Keras mixed_float16 + LossScaleOptimizer", "mixed_float16"),
}


def variants(model: Model, dtype: str, platform: str = "cpu") -> dict[str, Variant]:
  """The steps of a model in a compute dtype, by name; Keras writes its attention by platform."""
  _, loss, _ = model.build()
  half = DTYPES[dtype]

  def cast(params: Any, batch: Any) -> jax.Array:
    return loss(jax.tree.map(lambda p: p.astype(half), params), batch)

  by_hand = loss if dtype == "float32" else cast
  steps = {"hand-written": bare(by_hand)}
  if dtype == "bfloat16":
    steps["jmp casts"] = bare(jmp_casts(loss, half))
  else:
    steps["hand-written, skip by where"] = scaled_by_hand(by_hand)
    steps["flax DynamicScale"] = with_flax(by_hand)
    steps["jmp casts and loss scale"] = with_jmp(loss, half)
  steps["mpx"] = with_mpx(loss, half)
  if dtype == "float32":
    steps["optax.apply_if_finite (no scale)"] = bare(loss, optax.apply_if_finite(TX, 5))
  found = {name: (init, jax.jit(step, donate_argnums=0)) for name, (init, step) in steps.items()}
  found |= keras(model, dtype, platform)
  found |= ours(loss, by_hand, dtype)
  return found


def ours(loss: Any, by_hand: Any, dtype: str) -> dict[str, Variant]:
  """mpjax in pieces and whole."""
  policy = POLICIES[dtype]
  scaled = {} if dtype == "bfloat16" else {"mpjax.dynamic_loss_scale": with_loss_scale(by_hand)}
  if dtype == "bfloat16":
    scaled["mpjax.autocast"] = bare(mpjax.autocast(loss, policy))
  if dtype == "float16":
    scaled["mpjax.autocast + dynamic_loss_scale"] = with_loss_scale(mpjax.autocast(loss, policy))
  found = {name: (init, jax.jit(step, donate_argnums=0)) for name, (init, step) in scaled.items()}
  whole = mpjax.make_train_step(loss, TX, policy)
  found[f"mpjax.make_train_step {policy}"] = (whole.init, whole.jitted)
  if dtype == "float32":
    guarded = mpjax.make_train_step(loss, TX, {"base": "fp32", "loss_scaling": "dynamic"})
    found["mpjax.make_train_step fp32, dynamic loss scale"] = (guarded.init, guarded.jitted)
  return found


def keras(model: Model, dtype: str, platform: str) -> dict[str, Variant]:
  """Keras's step of the same model."""
  from benchmarks.overhead import _keras  # here, since it takes seconds to import

  name, policy = KERAS[dtype]
  return {name: _keras.variant(model.kind, model.settings, policy, platform)}


def bare(loss: Any, tx: optax.GradientTransformation = TX) -> Variant:
  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, tx.init(params)), step


def scaled_by_hand(loss: Any) -> Variant:
  """What tutorials write: scale, unscale, look at every gradient, keep the old state by `where`."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (scale, good) = state
    value, grads = jax.value_and_grad(lambda p: loss(p, batch) * scale)(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    updates, new = TX.update(grads, opt_state, params)
    grow = finite & (good + 1 >= 2000)
    scale = jnp.where(grow, scale * 2, jnp.where(finite, scale, jnp.maximum(scale / 2, 1)))
    good = jnp.where(finite & ~grow, good + 1, 0)
    params = where(finite, optax.apply_updates(params, updates), params)
    return (params, where(finite, new, opt_state), (scale, good)), value / scale

  return lambda params: (params, TX.init(params), (jnp.float32(2**15), jnp.int32(0))), step


def with_flax(loss: Any) -> Variant:
  def step(state: Any, batch: Any) -> Any:
    params, opt_state, scale = state
    scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
    updates, new = TX.update(grads, opt_state, params)
    params = where(finite, optax.apply_updates(params, updates), params)
    return (params, where(finite, new, opt_state), scale), value

  return lambda params: (params, TX.init(params), DynamicScale(scale=2.0**15)), step


def jmp_casts(loss: Any, dtype: Any) -> Any:
  policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
  return lambda params, batch: loss(*policy.cast_to_compute((params, batch)))


def with_jmp(loss: Any, dtype: Any) -> Variant:
  loss = jmp_casts(loss, dtype)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, leaves = state  # a jmp scale as an argument cannot be lowered ahead of time
    scale = jmp.DynamicLossScale(*leaves)
    value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, batch)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new = TX.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new)
    params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
    leaves = scale.adjust(finite)
    return (params, opt_state, (leaves.loss_scale, leaves.counter)), scale.unscale(value)

  return lambda params: (params, TX.init(params), (jnp.float32(2**15), jnp.int32(0))), step


def with_mpx(loss: Any, dtype: Any) -> Variant:
  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (value, least, counter) = state
    # set_half_precision_datatype("bfloat16") of mpx 0.1.8 changes nothing.
    mpx._dtypes.HALF_PRECISION_DATATYPE = dtype
    scale = mpx.DynamicLossScaling(value, least, factor=2, period=2000, counter=counter)
    loss_value, scale, finite, grads = mpx.filter_value_and_grad(loss, scale)(params, batch)
    params, opt_state = mpx.optimizer_update(params, TX, opt_state, grads, finite)
    return (params, opt_state, (scale.loss_scaling, scale.min_loss_scaling, scale.counter)), loss_value

  return lambda params: (params, TX.init(params), (jnp.float32(2**15), jnp.float32(1), jnp.int32(0))), step


def with_loss_scale(loss: Any) -> Variant:
  scaled = mpjax.dynamic_loss_scale(TX, init_scale=2.0**15)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state

    def of(params: Any) -> Any:
      value = loss(params, batch)
      return mpjax.scale_loss(value, opt_state), value

    (_, value), grads = jax.value_and_grad(of, has_aux=True)(params)
    updates, opt_state = scaled.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, scaled.init(params)), step


def where(finite: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
