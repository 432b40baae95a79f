"""A step of a user's own under `jax.jit` with divided parameters: a scan over layers like Llama's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import Plan, get_target

LAYERS, DIM, HIDDEN, VOCAB, HEADS = 8, 2048, 5632, 32000, 16
ROWS, LENGTH = 16, 1024
TARGET = "v5e:4x4"

Cast = Callable[[jax.Array], jax.Array]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  mean = jnp.mean(wide * wide, -1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def _layer(x: jax.Array, w: dict[str, jax.Array], cast: Cast) -> jax.Array:
  h = cast(_norm(x, w["norm1"]))
  q, k, v = ((h @ cast(w[name])).reshape(*h.shape[:2], HEADS, -1) for name in "qkv")
  attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape)
  x = x + (attended @ cast(w["o"])).astype(x.dtype)
  h = cast(_norm(x, w["norm2"]))
  gated = jax.nn.silu(h @ cast(w["gate"])) * (h @ cast(w["up"]))
  return x + (gated @ cast(w["down"])).astype(x.dtype)


def _loss(params: Any, tokens: jax.Array, cast: Cast = lambda x: x) -> jax.Array:
  layer = jax.checkpoint(lambda x, w: (_layer(x, w, cast), None), prevent_cse=False)
  x, _ = jax.lax.scan(layer, params["table"][tokens], params["layers"])
  logits = (cast(_norm(x, params["norm"])) @ cast(params["head"])).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


LOSSES: dict[str, Callable[..., jax.Array]] = {
  "fp32": _loss,
  "bf16 by autocast": mpjax.autocast(_loss, "bf16"),
  "bf16 by hand": lambda params, tokens: _loss(params, tokens, lambda x: x.astype(jnp.bfloat16)),
}


def plan(name: str) -> Plan:
  """Returns the plan of a step with AdamW whose parameters and rows are divided over all devices."""
  mesh = AbstractMesh((get_target(TARGET).devices,), ("fsdp",), axis_types=(AxisType.Auto,))

  def on(shape: tuple[int, ...], *spec: str | None, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  matrix = lambda rows, columns: on((LAYERS, rows, columns), None, "fsdp")
  layers = {name: matrix(DIM, DIM) for name in "qkvo"} | {
    name: on((LAYERS, DIM)) for name in ("norm1", "norm2")
  }
  layers |= {"gate": matrix(DIM, HIDDEN), "up": matrix(DIM, HIDDEN), "down": matrix(HIDDEN, DIM)}
  params: dict[str, Any] = {"table": on((VOCAB, DIM), "fsdp"), "head": on((DIM, VOCAB), None, "fsdp")}
  params |= {"norm": on((DIM,)), "layers": layers}
  tx = optax.adamw(1e-3)
  adam, *others = jax.eval_shape(tx.init, params)
  opt_state = (adam._replace(count=on((), dtype=jnp.int32), mu=params, nu=params), *others)

  def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(LOSSES[name])(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  tokens = on((ROWS, LENGTH), "fsdp", dtype=jnp.int32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  return mpjax.plan(jitted, params, opt_state, tokens, target=TARGET, compile=True)
