"""What the gpu suite has measured in processes of JAX: training steps, and matrix products alone."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._worker import serve_stages
from benchmarks.gpu._models import training
from mpjax.products import fp8_dot_general

Stages = Generator[dict[str, Any], str, None]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Name to dtypes of the operands, of the result, and precision.
PEAKS = {
  "float32": (jnp.float32, jnp.float32, jnp.float32, "float32"),
  "tensorfloat32": (jnp.float32, jnp.float32, jnp.float32, "tensorfloat32"),
  "bfloat16": (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, "default"),
  "float16": (jnp.float16, jnp.float16, jnp.float16, "default"),
  "float8": (E4M3, E4M3, jnp.bfloat16, "default"),
  "float8, gradients": (E5M2, E4M3, jnp.bfloat16, "default"),
}


def stages(task: dict[str, Any]) -> Stages:
  """What `worker.serve_stages` runs: what is known at first; compiled; begun; then a round each."""
  yield from {"peaks": peaks, "products": products, "step": step}[task["measure"]](task)


def step(task: dict[str, Any]) -> Stages:
  """A training step."""
  if task["attention"] == "cudnn" and jax.default_backend() != "gpu":
    yield {"skipped": "the fused attention kernel needs a GPU"}
    return
  # Compiles in a moment, where the default generator takes a while for every parameter.
  jax.config.update("jax_default_prng_impl", "rbg")
  made = training(task)
  begin = time.perf_counter()
  variables = jax.eval_shape(made.params)
  shapes = jax.eval_shape(made.state, variables), jax.eval_shape(made.batch)
  lowered = made.step.lower(*shapes)
  yield {
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(variables["params"])),
    "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)),
    "lower_s": time.perf_counter() - begin,
  }

  begin = time.perf_counter()
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  ready = {"compile_s": time.perf_counter() - begin, "held_bytes": held_bytes()}
  if memory is not None and memory.argument_size_in_bytes:  # which one from the cache may lack
    ready["step_bytes"] = (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
      - memory.alias_size_in_bytes
    )
  make_params, make_state = jax.jit(made.params), jax.jit(made.state, donate_argnums=0)
  programs = make_params.lower().compile(), make_state.lower(variables).compile()
  yield ready

  state, batch = programs[1](programs[0]()), made.batch()
  state, metrics = compiled(state, batch)
  first = float(metrics["loss"])
  for _ in range(task["warm_up"]):
    state, metrics = compiled(state, batch)
  jax.block_until_ready(state)
  yield {"first_loss": finite(first)}

  while True:
    # One that is not timed: others have had the device since.
    state, metrics = jax.block_until_ready(compiled(state, batch))
    begin = time.perf_counter()
    for _ in range(task["steps"]):
      state, metrics = compiled(state, batch)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - begin) / task["steps"]
    yield {
      "seconds": seconds,
      "loss": finite(float(metrics["loss"])),
      "skipped_steps": int(metrics.get("skipped_steps", 0)),
      "peak_bytes": peak_bytes(),
    }


def peaks(task: dict[str, Any]) -> Stages:
  """Square products of every dtype; both operands are contracted along their last dimension."""
  device = jax.devices()[0]
  yield {
    "device": f"{jax.device_count()} x {device.device_kind}",
    "platform": device.platform,
    "platform_version": device.client.platform_version.splitlines(),
    "memory": (device.memory_stats() or {}).get("bytes_limit"),
  }
  n, runs = task["size"], {}
  for name, (lhs, rhs, out, precision) in PEAKS.items():
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a device may have no FP8 units
      runs[name] = prepared(square_product(out, precision), random((n, n), lhs, 0), random((n, n), rhs, 1))
  yield {"held_bytes": held_bytes()}
  yield {}
  while True:
    yield {name: 2 * n**3 / timed(run, task["calls"]) for name, run in runs.items()}


def products(task: dict[str, Any]) -> Stages:
  """Forward, and forward with both backward products, of [M, K] by [K, N]."""
  m, n, k = task["shape"]
  x, w = random((m, k), jnp.bfloat16, 0), random((k, n), jnp.bfloat16, 1)
  ct = random((m, n), jnp.bfloat16, 2)
  dims = (((1,), (0,)), ((), ()))
  recipe = {"recipe": "current", "emulate": True}
  scale = jnp.float32(64.0)
  forward = {
    "bf16": lambda x, w: dot(x, w, ((1,), (0,)), jnp.bfloat16),
    "fp8, current": lambda x, w: fp8_dot_general(x, w, dims, recipe),
    "fp8, given scales": lambda x, w: fp8_dot_general(x, w, dims, recipe, scales=(scale,) * 3),
  }
  runs = {}
  for name, of in forward.items():

    def both(x: jax.Array, w: jax.Array, ct: jax.Array, of: Any = of) -> Any:
      out, pull = jax.vjp(of, x, w)
      return out, pull(ct)

    runs[name] = prepared(jax.jit(of), x, w), prepared(jax.jit(both), x, w, ct)

  # What is left without quantising: operands in FP8, and laid out as the units want them.
  a, b, g = x.astype(E4M3), w.T.astype(E4M3), ct.astype(E5M2)  # [M, K], [N, K], [M, N]
  last = lambda a, b: dot(a, b, ((1,), (1,)), jnp.bfloat16)
  three = lambda a, b, g, bt, at, gt: (last(a, b), last(g, bt), last(at, gt))
  transposed = (b.T.copy(), a.T.copy(), g.T.copy())  # [K, N], [K, M], [N, M]
  runs["fp8 operands"] = prepared(jax.jit(last), a, b), prepared(jax.jit(three), a, b, g, *transposed)
  yield {}
  while True:
    yield {name: [timed(run, task["calls"]) for run in pair] for name, pair in runs.items()}


def square_product(out: Any, precision: str) -> Any:
  """Returns a jitted product along the last dimensions, whose precision no later context changes."""
  return jax.jit(lambda a, b: dot(a, b, ((1,), (1,)), out, precision))


def dot(a: jax.Array, b: jax.Array, contracted: Any, out: Any, precision: str | None = None) -> jax.Array:
  """Returns a product of two matrices with a result of dtype `out`."""
  return jax.lax.dot_general(a, b, (contracted, ((), ())), precision=precision, preferred_element_type=out)


def random(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
  """Normal numbers: zeros would draw less power, and a GPU would keep a higher clock."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def prepared(function: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
  """A call that has been compiled and has run."""
  jax.block_until_ready(function(*arguments))
  return lambda: function(*arguments)


def timed(run: Callable[[], Any], calls: int) -> float:
  """Seconds a call, of several that are on their way at once, after one that is not timed."""
  jax.block_until_ready(run())
  begin = time.perf_counter()
  for _ in range(calls):
    out = run()
  jax.block_until_ready(out)
  return (time.perf_counter() - begin) / calls


def finite(x: float) -> float | None:
  """JSON has no NaN."""
  return x if math.isfinite(x) else None


def peak_bytes() -> int | None:
  """The most memory that this process has had in use on its device, where that is known."""
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def held_bytes() -> int:
  """What the allocator of this process has taken of its device and keeps."""
  stats = jax.devices()[0].memory_stats() or {}
  return int(np.max([stats.get(name, 0) for name in ("pool_bytes", "bytes_reserved", "peak_bytes_in_use")]))


if __name__ == "__main__":
  serve_stages(stages)
