"""A step like Llama's: RMS norms, rotary positions, shared keys, gated layers, scanned and recomputed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from mpjax._types import Array, PyTree

HEAD, WORDS = 64, 8192  # dimension of a head, vocabulary
# Size: width, layers, rows, tokens.
SIZES = {"small": (512, 4, 16, 512), "medium": (1024, 8, 16, 512), "large": (2048, 16, 8, 1024)}


def llama_step(size: str, policy: str) -> tuple[mpjax.TrainStep, tuple[PyTree, PyTree]]:
  """Returns a step of AdamW and the shapes of its state and batch."""
  width, layers, rows, tokens = SIZES[size]
  step = mpjax.make_train_step(_loss, optax.adamw(1e-3), policy)
  state = jax.eval_shape(lambda: step.init(jax.tree.map(jnp.zeros_like, _params(width, layers))))
  return step, (state, {"tokens": jax.ShapeDtypeStruct((rows, tokens + 1), jnp.int32)})


def _params(width: int, layers: int) -> dict[str, Any]:
  hidden, heads, shared = width * 11 // 4, width // HEAD, width // HEAD // 4
  of = functools.partial(jnp.zeros, dtype=jnp.float32)
  blocks = {
    "attention_norm": of((layers, width)),
    "query": of((layers, width, heads * HEAD)),
    "key": of((layers, width, shared * HEAD)),
    "value": of((layers, width, shared * HEAD)),
    "out": of((layers, heads * HEAD, width)),
    "norm": of((layers, width)),
    "gate": of((layers, width, hidden)),
    "up": of((layers, width, hidden)),
    "down": of((layers, hidden, width)),
  }
  return {"embed": of((WORDS, width)), "blocks": blocks, "norm": of((width,)), "head": of((width, WORDS))}


def _loss(params: PyTree, batch: PyTree) -> Array:
  x = params["embed"][batch["tokens"][:, :-1]]
  x, _ = jax.lax.scan(jax.checkpoint(_block), x, params["blocks"])
  logits = _normed(x, params["norm"]) @ params["head"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def _block(x: Array, w: PyTree) -> tuple[Array, None]:
  """One layer, x [B, T, D]."""
  heads = lambda y: y.reshape(*y.shape[:2], -1, HEAD)  # [B, T, N, H]
  h = _normed(x, w["attention_norm"])
  query, key, value = (heads(h @ w[name]) for name in ("query", "key", "value"))
  attended = jax.nn.dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
  x += attended.reshape(x.shape) @ w["out"]
  h = _normed(x, w["norm"])
  return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def _normed(x: Array, scale: Array) -> Array:
  return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def _rotated(x: Array) -> Array:
  """Turns pairs of dimensions by the position, x [B, T, N, H]."""
  rates = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
  angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
