"""What training.py has measured in processes of JAX: a policy's training step, or matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from worker import serve

import mpjax
from mpjax.fp8.product import fp8_dot_general
from mpjax.train.models import GPT

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
PRODUCTS = ("bf16", "fp8, current", "fp8, given scales", "fp8 operands")


def start(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
  """What `worker.serve` runs."""
  return {"peaks": start_peaks, "products": start_products, "step": start_step}[task["measure"]](task)


def start_step(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
  """Compiles and warms up a policy's training step."""
  if task["attention"] == "cudnn" and jax.default_backend() != "gpu":
    return {"skipped": "the fused attention kernel needs a GPU"}, dict
  policy = dict(task["policy"])
  if "fp8" in policy and jax.default_backend() == "cpu":
    policy["fp8"] = {"emulate": True, **policy["fp8"]}
  step, state, batch = training(task, policy)
  begin = time.perf_counter()
  compiled = step.jitted.lower(state, batch).compile()
  compile_s = time.perf_counter() - begin
  memory = compiled.memory_analysis()
  rows = step.explain(state, batch).rows if step.policy.autocast else ()
  flops = sum(row.flops for row in rows)
  fp8_flops = sum(row.flops for row in rows if row.after.startswith("float8"))
  ready = {
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    "compile_s": compile_s,
    "step_bytes": memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes,
    "fp8_share_of_flops": fp8_flops / flops if flops else 0.0,
  }
  state, metrics = compiled(state, batch)
  ready["first_loss"] = float(metrics["loss"])
  for _ in range(task["warm_up"]):
    state, metrics = compiled(state, batch)
  jax.block_until_ready(state)

  def measure() -> dict[str, Any]:
    nonlocal state, metrics
    begin = time.perf_counter()
    for _ in range(task["steps"]):
      state, metrics = compiled(state, batch)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - begin) / task["steps"]
    return {
      "seconds": seconds,
      "loss": float(metrics["loss"]),
      "skipped_steps": int(metrics.get("skipped_steps", 0)),
      "peak_bytes": peak_bytes(),
    }

  return ready, measure


def training(task: dict[str, Any], policy: dict[str, Any]) -> tuple[Any, Any, Any]:
  """The step, its first state and a batch of random tokens."""
  sizes, adamw = task["model"], task["adamw"]
  tx = optax.adamw(
    adamw["learning_rate"],
    b1=adamw["b1"],
    b2=adamw["b2"],
    eps=adamw["eps"],
    weight_decay=adamw["weight_decay"],
  )
  step = mpjax.make_train_step(loss, tx, policy)
  model = lambda: GPT(
    vocab_size=sizes["vocab"],
    max_len=task["seq"],
    dim=sizes["dim"],
    layers=sizes["layers"],
    heads=sizes["heads"],
    attention=task["attention"],
    rngs=nnx.Rngs(0),
  )
  shape = (task["batch"], task["seq"] + 1)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, sizes["vocab"], shape), jnp.int32)
  # Under jit, so that what `init` needs in between is no part of the peak.
  return step, jax.jit(lambda: step.init(model(), batch=tokens))(), tokens


def loss(model: GPT, tokens: jax.Array) -> jax.Array:
  """Mean cross entropy of [B, T + 1] tokens."""
  logits = model(tokens[:, :-1]).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def start_peaks(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
  """Square products of every dtype; both operands are contracted along their last dimension."""
  n, runs = task["size"], {}
  for name, (lhs, rhs, out, precision) in PEAKS.items():
    with jax.default_matmul_precision(precision):
      product = jax.jit(lambda a, b, out=out: dot(a, b, ((1,), (1,)), out))
      runs[name] = prepared(product, random((n, n), lhs, 0), random((n, n), rhs, 1))

  def measure() -> dict[str, Any]:
    return {name: 2 * n**3 / timed(run, task["calls"]) for name, run in runs.items()}

  device = jax.devices()[0]
  ready = {
    "device": f"{jax.device_count()} x {device.device_kind}",
    "platform": device.platform,
    "platform_version": device.client.platform_version.splitlines(),
  }
  return ready, measure


def start_products(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
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

  def measure() -> dict[str, Any]:
    return {name: [timed(run, task["calls"]) for run in pair] for name, pair in runs.items()}

  return {}, measure


def dot(a: jax.Array, b: jax.Array, contracted: Any, out: Any) -> jax.Array:
  """A product of two matrices with a result of dtype `out`."""
  return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=out)


def random(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
  """Normal numbers: zeros would draw less power, and a GPU would keep a higher clock."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def prepared(function: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
  """A call that has been compiled and has run."""
  jax.block_until_ready(function(*arguments))
  return lambda: function(*arguments)


def timed(run: Callable[[], Any], calls: int) -> float:
  """Seconds a call, of several that are on their way at once."""
  begin = time.perf_counter()
  for _ in range(calls):
    out = run()
  jax.block_until_ready(out)
  return (time.perf_counter() - begin) / calls


def peak_bytes() -> int | None:
  """The most memory that this process has held on its device, where that is known."""
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


if __name__ == "__main__":
  serve(start)
