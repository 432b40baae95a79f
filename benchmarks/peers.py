"""Dynamic loss scaling of mpjax beside that of other libraries, on the same step.

    python benchmarks/peers.py [--model tf|tf_opt|mlp|mlp_scan] [--rounds N] [--json FILE]

All in float32, so that nothing but the loss scaling differs; AdamW, state donated. Every variant runs in
every round, in shuffled order; the ratio to the bare step is taken within the round. On a CPU the ratios
tell of overhead, not of speed. They are taken twice: as the C library manages memory by default, where each
block over 32 MB is asked of the kernel and given back in every step, page faults and all; and with freed
memory kept.
"""

from __future__ import annotations

import ctypes
import sys
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
from overhead import MODELS, arguments, measure
from record import origin, print_times, write

import mpjax

TX = optax.adamw(1e-3)


def where(finite: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def variants(loss: Any) -> dict[str, tuple[Any, Any]]:
  """Name to (`params -> state`, jitted `(state, batch) -> (state, loss)`)."""
  scaled = mpjax.dynamic_loss_scale(TX)
  guarded = optax.apply_if_finite(TX, 5)

  def bare(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  def ours(state: Any, batch: Any) -> Any:
    params, opt_state = state

    def of(params: Any) -> Any:
      value = loss(params, batch)
      return mpjax.scale_loss(value, opt_state), value

    (_, value), grads = jax.value_and_grad(of, has_aux=True)(params)
    updates, opt_state = scaled.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  def with_flax(state: Any, batch: Any) -> Any:
    params, opt_state, scale = state
    scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
    updates, new = TX.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    return (where(finite, new_params, params), where(finite, new, opt_state), scale), value

  def with_jmp(state: Any, batch: Any) -> Any:
    params, opt_state, leaves = state  # a jmp scale as an argument cannot be lowered ahead of time
    scale = jmp.DynamicLossScale(*leaves)
    value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, batch)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new = TX.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    params, opt_state = jmp.select_tree(finite, (new_params, new), (params, opt_state))
    leaves = scale.adjust(finite)
    return (params, opt_state, (leaves.loss_scale, leaves.counter)), scale.unscale(value)

  def with_mpx(state: Any, batch: Any) -> Any:
    params, opt_state, (value, least, counter) = state
    mpx._dtypes.HALF_PRECISION_DATATYPE = jnp.float32
    scale = mpx.DynamicLossScaling(value, least, factor=2, period=2000, counter=counter)
    loss_value, scale, finite, grads = mpx.filter_value_and_grad(loss, scale)(params, batch)
    params, opt_state = mpx.optimizer_update(params, TX, opt_state, grads, finite)
    return (params, opt_state, (scale.loss_scaling, scale.min_loss_scaling, scale.counter)), loss_value

  def with_optax(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = guarded.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  f32, i32 = jnp.float32, jnp.int32
  steps: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bare": (lambda p: (p, TX.init(p)), bare),
    "mpjax.dynamic_loss_scale": (lambda p: (p, scaled.init(p)), ours),
    "jmp + select_tree": (lambda p: (p, TX.init(p), (f32(2**15), i32(0))), with_jmp),
    "flax DynamicScale + where": (lambda p: (p, TX.init(p), DynamicScale()), with_flax),
    "mpx": (lambda p: (p, TX.init(p), (f32(2**15), f32(1), i32(0))), with_mpx),
    "optax.apply_if_finite (no scale)": (lambda p: (p, guarded.init(p)), with_optax),
  }
  return {name: (init, jax.jit(step, donate_argnums=0)) for name, (init, step) in steps.items()}


def keep_freed_memory() -> bool:
  """Tells the C library to keep what is freed; whether it understood."""
  if not sys.platform.startswith("linux"):
    return False
  trim_threshold, mmap_max = -1, -4
  libc = ctypes.CDLL(None)
  return bool(libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1))


def main() -> None:
  options = arguments(__doc__)
  peers = ("optax", "flax", "jmp", "mixed-precision-for-JAX")
  report: dict[str, Any] = origin(f"peers.py --rounds {options.rounds}", *peers) | {"models": {}}
  for memory in ("default", "kept"):
    if memory == "kept" and not keep_freed_memory():
      print("the allocator of this system cannot be told to keep memory: no second table")
      break
    for model in options.model or MODELS:
      title = f"{model}, memory {memory}"
      rows = report["models"][title] = measure(model, options.rounds, variants)
      print_times(title, rows)
  write(report, options.json)


if __name__ == "__main__":
  main()
