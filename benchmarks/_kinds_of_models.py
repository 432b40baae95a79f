"""Kinds of model in plain linen, small, for the ablation; by themselves and with careful casts by hand.

They take `dtype` as those of `_transformers` do. By hand, products, convolutions and what lies between them
are in half precision; softmax, statistics, the memory of recurrences and the loss are in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks._transformers import GPT, Block

F32, I32 = jnp.float32, jnp.int32


class OfTokens(nn.Module):
  """Embeds tokens [B, T], applies a layer that keeps their shape, and returns logits [B, T, vocab]."""

  layer: Callable[..., nn.Module]
  width: int = 512
  vocab: int = 256
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)  # [B, T, width]
    x = self.layer(dtype=self.dtype)(x)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(self.vocab, dtype=self.dtype)(x)


class ScannedBlocks(nn.Module):
  layers: int
  heads: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    block = Block(self.heads, True, self.dtype, name="blocks")
    step = nn.scan(
      lambda block, x, _: (block(x), None), {"params": 0}, split_rngs={"params": True}, length=self.layers
    )
    return step(block, x, None)[0]


class StateSpace(nn.Module):
  """A gated linear recurrence by `associative_scan`, whose memory is float32."""

  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def join(a: Any, b: Any) -> Any:
      return a[0] * b[0], a[1] * b[0] + b[1]

    width = x.shape[-1]
    y = nn.LayerNorm(dtype=self.dtype)(x)
    value, forget, gate = jnp.split(nn.Dense(3 * width, dtype=self.dtype)(y), 3, axis=-1)
    rate = self.param("rate", nn.initializers.ones, (width,))
    decay = jnp.exp(-nn.softplus(forget.astype(F32)) * rate)  # f32[B, T, width]
    _, memory = jax.lax.associative_scan(join, (decay, (1 - decay) * value.astype(F32)), axis=1)
    y = memory.astype(x.dtype) * nn.silu(gate)
    return x + nn.Dense(width, dtype=self.dtype)(y)


class Experts(nn.Module):
  """One expert to a token, which one-hots send; the router is float32."""

  experts: int = 8
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    _, t, d = x.shape
    places = 5 * t // (4 * self.experts)
    y = nn.LayerNorm(dtype=self.dtype)(x)
    scores = nn.softmax(nn.Dense(self.experts, dtype=F32, name="router")(y.astype(F32)))
    chosen = jax.nn.one_hot(scores.argmax(-1), self.experts, dtype=F32)  # [B, T, E]
    place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(I32)  # -1 is no expert's
    sent = chosen[..., None] * jax.nn.one_hot(place, places, dtype=F32)  # [B, T, E, C]
    sent = sent.astype(y.dtype)
    weights = (scores.max(-1)[..., None, None] * sent.astype(F32)).astype(y.dtype)
    init = nn.initializers.lecun_normal(batch_axis=(0,))
    up = self.param("up", init, (self.experts, d, 4 * d)).astype(y.dtype)
    down = self.param("down", init, (self.experts, 4 * d, d)).astype(y.dtype)
    hidden = nn.gelu(jnp.einsum("becd,edh->bech", jnp.einsum("btec,btd->becd", sent, y), up))
    return x + jnp.einsum("btec,becd->btd", weights, jnp.einsum("bech,ehd->becd", hidden, down))


class BERT(nn.Module):
  """A post-norm layer with dropout and a padding mask added to the scores: tokens to logits."""

  width: int = 512
  heads: int = 8
  vocab: int = 8192
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array, padding: jax.Array) -> jax.Array:
    dense = lambda width, x: nn.Dense(width, dtype=self.dtype)(x)
    drop = lambda x: nn.Dropout(0.1, deterministic=False)(x)
    norm = lambda x: nn.LayerNorm(dtype=self.dtype)(x)
    b, t = tokens.shape
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
    position = self.param("position", nn.initializers.normal(0.02), (t, self.width))
    x = drop(norm(x + position.astype(x.dtype)))
    mask = (1.0 - padding[:, None, None, :]) * -1e9  # f32[B, 1, 1, T]
    size = self.width // self.heads
    q, k, v = (dense(self.width, x).reshape(b, t, self.heads, size) for _ in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) / size**0.5 + mask
    weights = drop(nn.softmax(scores).astype(v.dtype))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, self.width)
    x = norm(x + drop(dense(self.width, mixed)))
    x = norm(x + drop(dense(self.width, nn.gelu(dense(4 * self.width, x)))))
    return dense(self.vocab, norm(nn.gelu(dense(self.width, x))))  # [B, T, vocab]


class UNet(nn.Module):
  """Predicts noise: two levels, two convolutions to a block, a skip connection; [B, S, S, 3] to the same."""

  widths: tuple[int, int] = (64, 128)
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    narrow, wide = self.widths
    conv = lambda x, width, window=3, stride=1: nn.Conv(
      width, (window, window), (stride, stride), dtype=self.dtype
    )(x)
    activate = lambda x: nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))

    def block(x: jax.Array, width: int) -> jax.Array:
      y = conv(activate(conv(activate(x), width)), width)
      return y + (x if x.shape[-1] == width else conv(x, width, 1))

    skip = block(conv(images, narrow), narrow)
    x = block(conv(skip, narrow, stride=2), wide)
    x = jax.image.resize(x, (*skip.shape[:-1], wide), "nearest")
    x = block(jnp.concatenate([conv(x, narrow), skip], axis=-1), narrow)
    return conv(activate(x), images.shape[-1])


class ResNet(nn.Module):
  """Basic blocks with batch norm: [B, S, S, 3] to [B, 100]."""

  widths: tuple[int, ...] = (64, 128)
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    def conv(x: jax.Array, width: int, window: int = 3, stride: int = 1) -> jax.Array:
      shape = (window, window), (stride, stride)
      x = nn.Conv(width, *shape, use_bias=False, dtype=self.dtype)(x)
      return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)

    x = nn.relu(conv(images, self.widths[0]))
    for i, width in enumerate(self.widths):
      stride = 1 if i == 0 else 2
      y = conv(nn.relu(conv(x, width, stride=stride)), width)
      x = nn.relu(y + (x if i == 0 else conv(x, width, 1, stride)))
    return nn.Dense(100, dtype=self.dtype)(x.mean((1, 2)))


class Autoencoder(nn.Module):
  """A variational one, of pixels between 0 and 1: [B, P] to logits [B, P]."""

  hidden: int = 400
  latent: int = 20
  dtype: Any = None

  @nn.compact
  def __call__(self, pixels: jax.Array) -> jax.Array:
    x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(pixels))
    mean = nn.Dense(self.latent, dtype=self.dtype)(x)
    deviation = jnp.exp(0.5 * nn.Dense(self.latent, dtype=self.dtype)(x).astype(F32))
    noise = jax.random.normal(self.make_rng("dropout"), mean.shape)
    x = (mean.astype(F32) + deviation * noise).astype(mean.dtype)
    x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x))
    return nn.Dense(pixels.shape[-1], dtype=self.dtype)(x)


@dataclasses.dataclass(frozen=True)
class Example:
  """A float32 model, the shapes of what it is given and compared with, and its loss.

  Attributes:
    model: a module with a `dtype`.
    inputs: of the model, in order.
    target: what its result is compared with.
    compare: (result in float32, target) -> loss, `f32[]`.
  """

  model: Any
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  target: jax.ShapeDtypeStruct
  compare: Callable[[jax.Array, jax.Array], jax.Array]

  def shapes(self) -> tuple[Any, Any, Any]:
    """Those of parameters, of running statistics, and of a batch with the key of its dropout."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0, impl="rbg")}
    statistics = dict(jax.eval_shape(self.model.init, keys, *self.inputs))
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    batch = {"inputs": self.inputs, "target": self.target, "key": key}
    return statistics.pop("params"), statistics, batch

  def loss(self, dtype: Any = None) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
    """`(params, statistics, batch) -> (loss, statistics)`; cast by hand where given a dtype."""
    model = self.model.clone(dtype=dtype)

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
      rngs = {"dropout": jax.random.wrap_key_data(batch["key"], impl="rbg")}
      variables = {"params": params, **statistics}
      result, new = model.apply(variables, *batch["inputs"], rngs=rngs, mutable=list(statistics))
      return self.compare(result.astype(F32), batch["target"]), new

    return loss


def _shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _of_tokens(model: Any, batch: int, length: int, *inputs: jax.ShapeDtypeStruct) -> Example:
  tokens = _shape(batch, length, dtype=I32)
  return Example(model, (tokens, *inputs), tokens, _cross_entropy)


_scanned = functools.partial(ScannedBlocks, 4, 16)
_images, _pixels = _shape(64, 64, 64, 3), _shape(16_384, 784)
EXAMPLES = {
  "transformer": _of_tokens(GPT(512, 8, 2, 256), 16, 512),
  "transformer, scanned": _of_tokens(OfTokens(_scanned, 2048), 2, 256),
  "BERT": _of_tokens(BERT(), 64, 256, _shape(64, 256)),
  "state space": _of_tokens(OfTokens(StateSpace), 32, 512),
  "mixture of experts": _of_tokens(OfTokens(Experts), 32, 512),
  "U-Net": Example(UNet(), (_images,), _images, lambda noise, true: jnp.square(noise - true).mean()),
  "ResNet": Example(ResNet(), (_shape(256, 32, 32, 3),), _shape(256, dtype=I32), _cross_entropy),
  "autoencoder": Example(
    Autoencoder(),
    (_pixels,),
    _pixels,
    lambda logits, pixels: optax.sigmoid_binary_cross_entropy(logits, pixels).sum(-1).mean(),
  ),
}
