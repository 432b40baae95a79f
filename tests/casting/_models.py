"""Small whole models in plain float32 code, each also with careful casts by hand.

Given `dtype=None` the code below is the float32 model: what follows `dtype` then (`astype` to what a value has
already) puts nothing into the program. Given a half-precision dtype it is what a careful author writes: products
in `dtype`; softmax, statistics of norms, recurrent memory, sums over experts and the loss in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, CLASSES, EXPERTS, STEPS = 32, 4, 4, 50
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
  """A model with a task that it learns in a few steps.

  Attributes:
    init: () -> float32 parameters, and the state that training changes besides them (`{}` for most).
    loss: dtype or None -> (params, state, batch) -> (float32[], new state).
    batch: seed -> batch.
  """

  init: Callable[[], tuple[Any, Any]]
  loss: Callable[[Any], Loss]
  batch: Callable[[int], dict[str, np.ndarray]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def text_batch(seed: int, batch: int = 8, length: int = 16) -> dict[str, np.ndarray]:
  """Tokens of which the next follows from the last two, with some noise."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, VOCAB, (batch, length + 1))
  for i in range(2, length + 1):
    follows = (tokens[:, i - 1] + 3 * (tokens[:, i - 2] % 4) + 1) % VOCAB
    tokens[:, i] = np.where(rng.random(batch) < 0.9, follows, tokens[:, i])
  return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


def image_batch(seed: int, batch: int = 8, side: int = 8) -> dict[str, np.ndarray]:
  """Stripes in one of four directions, with noise."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, CLASSES, batch)
  angle, phase = y * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, batch)
  grid = np.arange(side)
  along = np.cos(angle)[:, None, None] * grid[:, None] + np.sin(angle)[:, None, None] * grid
  x = np.sin(1.5 * along + phase[:, None, None])[..., None] + 0.3 * rng.standard_normal(
    (batch, side, side, 3)
  )
  return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def diffusion_batch(seed: int, batch: int = 4) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  x = image_batch(seed, batch)["x"]
  t = rng.integers(0, STEPS, batch).astype(np.int32)
  return {"x": x, "t": t, "noise": rng.standard_normal(x.shape).astype(np.float32)}


# GPT, linen: a causal mask of finfo.min, embeddings shared with the head.
class GPTBlock(nn.Module):
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
    d = x.shape[-1]
    mask = nn.make_causal_mask(x[..., 0])
    attention = nn.MultiHeadDotProductAttention(
      2, dtype=self.dtype, force_fp32_for_softmax=self.dtype is not None, name="attention"
    )
    x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
    y = nn.Dense(4 * d, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
    return x + nn.Dense(d, dtype=self.dtype, name="down")(nn.gelu(y))


class GPT(nn.Module):
  dtype: Any
  width: int = 32

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T]
    embed = nn.Embed(VOCAB, self.width, dtype=self.dtype, name="embed")
    position = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
    x = embed(tokens)
    x = x + position.astype(x.dtype)
    x = GPTBlock(self.dtype, name="block")(x)
    return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))  # [B, T, VOCAB]


# ResNet, linen: strides, projections, batch statistics that the loss hands back.
class ResNet(nn.Module):
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C]
    norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
    conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False, dtype=self.dtype)
    x = nn.relu(norm()(conv(4, strides=2)(x)))
    x = nn.max_pool(x, (2, 2), strides=(1, 1), padding="SAME")
    for features, stride in ((4, 1), (8, 2)):
      y = nn.relu(norm()(conv(features, strides=stride)(x)))
      y = norm()(conv(features)(y))
      if y.shape != x.shape:
        x = norm()(conv(features, kernel_size=(1, 1), strides=stride)(x))
      x = nn.relu(x + y)
    return nn.Dense(CLASSES, dtype=self.dtype, name="head")(x.mean((1, 2), dtype=jnp.float32).astype(x.dtype))


# U-Net for diffusion, linen: GroupNorm, time embedding, attention at half the side, skip connections.
class ResBlock(nn.Module):
  features: int
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:  # [B, H, W, C], [B, E]
    norm = functools.partial(nn.GroupNorm, num_groups=2, dtype=self.dtype)
    y = nn.Conv(self.features, (3, 3), dtype=self.dtype)(nn.silu(norm()(x)))
    y = y + nn.Dense(self.features, dtype=self.dtype)(nn.silu(time))[:, None, None]
    y = nn.Conv(self.features, (3, 3), dtype=self.dtype)(nn.silu(norm()(y)))
    if x.shape[-1] != self.features:
      x = nn.Conv(self.features, (1, 1), dtype=self.dtype)(x)
    return x + y


class UNet(nn.Module):
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:  # [B, H, W, C], int[B]
    b, side, *_ = x.shape
    frequencies = jnp.exp(-jnp.log(1e4) * jnp.arange(8) / 8)
    angles = t[:, None] * frequencies
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    time = nn.Dense(32, dtype=self.dtype)(nn.silu(nn.Dense(32, dtype=self.dtype)(time)))
    skip = ResBlock(4, self.dtype)(nn.Conv(4, (3, 3), dtype=self.dtype)(x), time)
    y = ResBlock(8, self.dtype)(nn.Conv(8, (3, 3), strides=2, dtype=self.dtype)(skip), time)
    y = y + self.attention(nn.GroupNorm(2, dtype=self.dtype)(y).reshape(b, -1, 8)).reshape(y.shape)
    y = jax.image.resize(y, (b, side, side, 8), "nearest")
    y = ResBlock(4, self.dtype)(jnp.concatenate([y, skip], -1), time)
    return nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(2, dtype=self.dtype)(y)))

  def attention(self, x: jax.Array) -> jax.Array:  # [B, T, D]
    q, k, v = jnp.split(nn.Dense(3 * x.shape[-1], dtype=self.dtype, name="qkv")(x), 3, -1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32) / np.sqrt(x.shape[-1])
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores).astype(v.dtype), v)


def diffusion_loss(dtype: Any) -> Loss:
  def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    kept = jnp.cumprod(1 - jnp.linspace(1e-3, 0.1, STEPS))[batch["t"], None, None, None]
    noised = jnp.sqrt(kept) * batch["x"] + jnp.sqrt(1 - kept) * batch["noise"]
    predicted = UNet(dtype).apply(params, noised, batch["t"]).astype(jnp.float32)
    return jnp.mean((predicted - batch["noise"]) ** 2), state

  return loss


# ViT, nnx: a class token, attention by nnx.
class ViTBlock(nnx.Module):
  def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
    self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
    q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(*x.shape[:2], 2, -1), 3, -1)  # each [B, T, H, D / H]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", nnx.softmax(scores).astype(v.dtype), v)
    x = x + self.out(mixed.reshape(x.shape))
    return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
  def __init__(self, dtype: Any, rngs: nnx.Rngs, width: int = 32):
    self.patches = nnx.Conv(3, width, (4, 4), strides=4, dtype=dtype, rngs=rngs)
    self.token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 1, width)))
    self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (5, width)))
    self.block = ViTBlock(width, dtype, rngs)
    self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(width, CLASSES, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C]
    x = self.patches(x).reshape(x.shape[0], 4, -1)
    token = jnp.broadcast_to(self.token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([token, x], 1) + self.position[...].astype(x.dtype)
    return self.head(self.norm(self.block(x)[:, 0]))


# A second convolutional network with batch statistics, nnx: average pooling, squeeze and excitation.
class ConvNet(nnx.Module):
  def __init__(self, dtype: Any, rngs: nnx.Rngs):
    self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
    self.norm1 = nnx.BatchNorm(8, momentum=0.9, dtype=dtype, rngs=rngs)
    self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, use_bias=False, dtype=dtype, rngs=rngs)
    self.pointwise = nnx.Conv(8, 16, (1, 1), use_bias=False, dtype=dtype, rngs=rngs)
    self.norm2 = nnx.BatchNorm(16, momentum=0.9, dtype=dtype, rngs=rngs)
    self.squeeze = nnx.Linear(16, 4, dtype=dtype, rngs=rngs)
    self.excite = nnx.Linear(4, 16, dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(16, CLASSES, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C]
    x = nnx.avg_pool(nnx.relu(self.norm1(self.stem(x))), (2, 2), (2, 2))
    x = nnx.hard_swish(self.norm2(self.pointwise(self.depthwise(x))))
    x = x * nnx.sigmoid(self.excite(nnx.relu(self.squeeze(mean(x)))))[:, None, None]
    return self.head(mean(x))


def mean(x: jax.Array) -> jax.Array:
  return x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)


# An LSTM by scan, plain JAX.
def lstm_init() -> tuple[Any, Any]:
  draw = drawer()
  return {
    "embed": draw(VOCAB, 32, scale=1.0),
    "in": draw(32, 128),
    "hidden": draw(32, 128),
    "bias": jnp.zeros(128),
    "out": draw(32, VOCAB),
  }, {}


def lstm_loss(dtype: Any) -> Loss:
  def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    half = lambda x: x.astype(dtype or x.dtype)

    def cell(carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:  # x: [B, D]
      hidden, memory = carry
      gates = half(x) @ half(params["in"]) + half(hidden) @ half(params["hidden"])
      i, f, g, o = jnp.split(gates.astype(jnp.float32) + params["bias"], 4, -1)
      memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
      hidden = half(jax.nn.sigmoid(o) * jnp.tanh(memory))
      return (hidden, memory), hidden

    x = half(jnp.swapaxes(params["embed"][batch["x"]], 0, 1))  # [T, B, D]
    _, hidden = jax.lax.scan(cell, (jnp.zeros_like(x[0]), jnp.zeros(x[0].shape)), x)
    return cross_entropy(jnp.swapaxes(hidden @ half(params["out"]), 0, 1), batch["y"]), state

  return loss


# A mixture of experts by ragged products, plain JAX: two experts for each token, a balancing loss.
def experts_init() -> tuple[Any, Any]:
  draw = drawer()
  return {
    "embed": draw(VOCAB, 32, scale=1.0),
    "scale": jnp.ones(32),
    "router": draw(32, EXPERTS),
    "up": draw(EXPERTS, 32, 64),
    "down": draw(EXPERTS, 64, 32),
    "out": draw(64, VOCAB),
  }, {}


def experts_loss(dtype: Any) -> Loss:
  def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    half = lambda x: x.astype(dtype or x.dtype)
    x = half(params["embed"][batch["x"].reshape(-1)])  # [N, D]
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    y = half(wide * root * params["scale"])
    probabilities = jax.nn.softmax((y @ half(params["router"])).astype(jnp.float32))  # [N, EXPERTS]
    gates, chosen = jax.lax.top_k(probabilities, 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    up = jax.nn.silu(jax.lax.ragged_dot(y[order // 2], half(params["up"]), sizes))
    down = jax.lax.ragged_dot(up, half(params["down"]), sizes)
    weighted = down.astype(jnp.float32) * gates.reshape(-1)[order][:, None]
    x = x + half(jnp.zeros(x.shape).at[order // 2].add(weighted))
    x = x.reshape(*batch["x"].shape, -1)
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the token before, too
    logits = jnp.concatenate([x, before], -1) @ half(params["out"])
    balance = EXPERTS * jnp.sum(probabilities.mean(0) * jax.lax.stop_gradient(sizes / order.size))
    return cross_entropy(logits, batch["y"]) + 0.01 * balance, state

  return loss


def drawer() -> Callable[..., np.ndarray]:
  rng = np.random.default_rng(0)

  def draw(*shape: int, scale: float | None = None) -> np.ndarray:
    scale = shape[-2] ** -0.5 if scale is None else scale
    return np.asarray(scale * rng.standard_normal(shape), np.float32)

  return draw


def drawn(shapes: Any) -> Any:
  """Initial values for a tree of shapes, by the name of the leaf; to compile an initialiser takes seconds."""
  draw = drawer()

  def fill(path: Any, leaf: Any) -> np.ndarray:
    name = jax.tree_util.keystr(path)
    if leaf.ndim == 1:
      return np.full(leaf.shape, "scale" in name or "var" in name, np.float32)
    if "kernel" not in name:
      return draw(*leaf.shape, scale=0.02 if leaf.shape[0] != VOCAB else leaf.shape[1] ** -0.5)
    return draw(*leaf.shape, scale=(leaf.size / leaf.shape[-1]) ** -0.5)

  return jax.tree_util.tree_map_with_path(fill, shapes)


def linen_init(model: Any, batch: Any, *names: str) -> tuple[Any, Any]:
  variables = jax.eval_shape(model.init, jax.random.key(0), *(batch[name] for name in names))
  state = {name: value for name, value in variables.items() if name != "params"}
  return drawn({"params": variables["params"]}), drawn(state)


def linen_loss(build: Any) -> Callable[[Any], Loss]:
  def with_dtype(dtype: Any) -> Loss:
    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
      logits, state = build(dtype).apply({**params, **state}, batch["x"], mutable=list(state))
      return cross_entropy(logits, batch["y"]), state

    return loss

  return with_dtype


def nnx_init(build: Any) -> tuple[Any, Any]:
  _, params, state = nnx.split(nnx.eval_shape(lambda: build(None, nnx.Rngs(0))), nnx.Param, ...)
  return drawn(params), drawn(state)


def nnx_loss(build: Any) -> Callable[[Any], Loss]:
  def with_dtype(dtype: Any) -> Loss:
    graph = nnx.graphdef(nnx.eval_shape(lambda: build(dtype, nnx.Rngs(0))))

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
      model = nnx.merge(graph, params, state, copy=True)
      value = cross_entropy(model(batch["x"]), batch["y"])
      return value, nnx.split(model, nnx.Param, ...)[2]

    return loss

  return with_dtype


MODELS = {
  "gpt": Model(lambda: linen_init(GPT(None), text_batch(0), "x"), linen_loss(GPT), text_batch),
  "vit": Model(lambda: nnx_init(ViT), nnx_loss(ViT), image_batch),
  "resnet": Model(lambda: linen_init(ResNet(None), image_batch(0), "x"), linen_loss(ResNet), image_batch),
  "convnet": Model(lambda: nnx_init(ConvNet), nnx_loss(ConvNet), image_batch),
  "lstm": Model(lstm_init, lstm_loss, text_batch),
  "experts": Model(experts_init, experts_loss, text_batch),
  "unet": Model(
    lambda: linen_init(UNet(None), diffusion_batch(0), "x", "t"), diffusion_loss, diffusion_batch
  ),
}
