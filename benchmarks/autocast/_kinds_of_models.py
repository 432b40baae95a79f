"""Kinds of model in plain linen, small, for the ablation; by themselves and with careful casts by hand.

They take `dtype` as those of `_models` do. By hand, products, convolutions and what lies between them are in
half precision; softmax, statistics, the memory of recurrent layers and the loss are in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.autocast._models import GPT, Block

Arrays = Mapping[str, Any]
F32, I32 = jnp.float32, jnp.int32


class ScannedGPT(nn.Module):
  width: int
  heads: int
  layers: int
  vocab: int
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)  # [B, T, width]
    block = Block(self.heads, True, self.dtype, name="blocks")
    step = nn.scan(
      lambda block, x, _: (block(x), None), {"params": 0}, split_rngs={"params": True}, length=self.layers
    )
    x, _ = step(block, x, None)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(self.vocab, dtype=self.dtype)(x)  # [B, T, vocab]


class UNet(nn.Module):
  """Predicts noise: two levels, two convolutions to a block, skip connections; [B, S, S, 3] to the same."""

  widths: tuple[int, ...] = (64, 128)
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    def block(x: jax.Array, width: int) -> jax.Array:
      y = x
      for _ in range(2):
        y = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(y))
        y = nn.Conv(width, (3, 3), dtype=self.dtype)(y)
      return y + (x if x.shape[-1] == width else nn.Conv(width, (1, 1), dtype=self.dtype)(x))

    x = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype)(images)
    skips = []
    for width in self.widths[:-1]:
      x = block(x, width)
      skips.append(x)
      x = nn.Conv(width, (3, 3), (2, 2), dtype=self.dtype)(x)
    x = block(x, self.widths[-1])
    for width, skip in zip(self.widths[-2::-1], reversed(skips), strict=True):
      x = jax.image.resize(x, (*skip.shape[:-1], x.shape[-1]), "nearest")
      x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
      x = block(jnp.concatenate([x, skip], axis=-1), width)
    x = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))
    return nn.Conv(images.shape[-1], (3, 3), dtype=self.dtype)(x)


class ResNet(nn.Module):
  """Basic blocks with batch norm: [B, S, S, 3] to [B, 100]."""

  widths: tuple[int, ...] = (64, 128)
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    def norm(x: jax.Array) -> jax.Array:
      return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)

    def conv(x: jax.Array, width: int, window: int, stride: int = 1) -> jax.Array:
      return nn.Conv(width, (window, window), (stride, stride), use_bias=False, dtype=self.dtype)(x)

    x = nn.relu(norm(conv(images, self.widths[0], 3)))
    for i, width in enumerate(self.widths):
      stride = 1 if i == 0 else 2
      y = nn.relu(norm(conv(x, width, 3, stride)))
      y = norm(conv(y, width, 3))
      x = nn.relu(y + (x if i == 0 else norm(conv(x, width, 1, stride))))
    return nn.Dense(100, dtype=self.dtype)(x.mean((1, 2)))


class ConvNeXt(nn.Module):
  """Depth-wise convolutions with layer norm and layer scale: [B, S, S, 3] to [B, 100]."""

  widths: tuple[int, ...] = (96, 192)
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    x = images
    for i, width in enumerate(self.widths):
      window = 4 if i == 0 else 2
      x = nn.Conv(width, (window, window), (window, window), dtype=self.dtype)(x)
      x = nn.LayerNorm(dtype=self.dtype)(x)
      y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
      y = nn.LayerNorm(dtype=self.dtype)(y)
      y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
      y = nn.Dense(width, dtype=self.dtype)(y)
      scale = self.param(f"scale_{i}", nn.initializers.constant(1e-6), (width,))
      x = x + y * scale.astype(y.dtype)
    x = nn.LayerNorm(dtype=self.dtype)(x.mean((1, 2)))
    return nn.Dense(100, dtype=self.dtype)(x)


class Cell(nn.Module):
  """A step of an LSTM; its memory is float32, what it shows has the dtype of its products."""

  width: int
  dtype: Any = None

  @nn.compact
  def __call__(self, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    memory, shown = carry  # f32[B, width], [B, width]
    gates = nn.Dense(4 * self.width, dtype=self.dtype)(jnp.concatenate([x, shown], axis=-1))
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    memory = nn.sigmoid(f) * memory + (nn.sigmoid(i) * jnp.tanh(g)).astype(F32)
    shown = nn.sigmoid(o) * jnp.tanh(memory).astype(o.dtype)
    return (memory, shown), shown


class LSTM(nn.Module):
  width: int = 512
  vocab: int = 256
  layers: int = 1
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)  # [B, T, width]
    for _ in range(self.layers):
      scanned = nn.scan(
        Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
      )
      start = jnp.zeros((len(x), self.width), F32)
      _, x = scanned(self.width, self.dtype)((start, start.astype(x.dtype)), x)
    return nn.Dense(self.vocab, dtype=self.dtype)(x)  # [B, T, vocab]


class StateSpace(nn.Module):
  """Gated linear recurrences by `associative_scan`, whose memory is float32."""

  width: int = 512
  vocab: int = 256
  layers: int = 1
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    def join(a: Any, b: Any) -> Any:
      return a[0] * b[0], a[1] * b[0] + b[1]

    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)  # [B, T, width]
    for i in range(self.layers):
      y = nn.LayerNorm(dtype=self.dtype)(x)
      value, forget, gate = jnp.split(nn.Dense(3 * self.width, dtype=self.dtype)(y), 3, axis=-1)
      rate = self.param(f"rate_{i}", nn.initializers.ones, (self.width,))
      decay = jnp.exp(-nn.softplus(forget.astype(F32)) * rate)  # f32[B, T, width]
      _, memory = jax.lax.associative_scan(join, (decay, (1 - decay) * value.astype(F32)), axis=1)
      y = memory.astype(x.dtype) * nn.silu(gate)
      x = x + nn.Dense(self.width, dtype=self.dtype)(y)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(self.vocab, dtype=self.dtype)(x)  # [B, T, vocab]


class Mixture(nn.Module):
  """Residual layers of experts, one to a token, sent by one-hots; the router is float32."""

  width: int = 512
  experts: int = 8
  vocab: int = 256
  layers: int = 1
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)  # [B, T, width]
    _, t, d = x.shape
    places = 5 * t // (4 * self.experts)
    for i in range(self.layers):
      y = nn.LayerNorm(dtype=self.dtype)(x)
      scores = nn.softmax(nn.Dense(self.experts, dtype=F32, name=f"router_{i}")(y.astype(F32)))
      chosen = jax.nn.one_hot(scores.argmax(-1), self.experts, dtype=F32)  # [B, T, E]
      place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(I32)  # -1 is no expert's
      sent = chosen[..., None] * jax.nn.one_hot(place, places, dtype=F32)  # [B, T, E, C]
      sent = sent.astype(y.dtype)
      weights = (scores.max(-1)[..., None, None] * sent.astype(F32)).astype(y.dtype)
      inputs = jnp.einsum("btec,btd->becd", sent, y)
      init = nn.initializers.lecun_normal(batch_axis=(0,))
      up = self.param(f"up_{i}", init, (self.experts, d, 4 * d)).astype(y.dtype)
      down = self.param(f"down_{i}", init, (self.experts, 4 * d, d)).astype(y.dtype)
      hidden = nn.gelu(jnp.einsum("becd,edh->bech", inputs, up))
      x = x + jnp.einsum("btec,becd->btd", weights, jnp.einsum("bech,ehd->becd", hidden, down))
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(self.vocab, dtype=self.dtype)(x)  # [B, T, vocab]


class Recommender(nn.Module):
  """A DLRM: embeddings of categories, their products by pairs, a perceptron below and one above."""

  categories: int = 4
  rows: int = 20_000
  width: int = 64
  dtype: Any = None

  @nn.compact
  def __call__(self, dense: jax.Array, ids: jax.Array) -> jax.Array:
    x = dense
    for size in (512, 256, self.width):
      x = nn.relu(nn.Dense(size, dtype=self.dtype)(x))
    features = [x]
    for i in range(self.categories):
      features.append(nn.Embed(self.rows, self.width, dtype=self.dtype)(ids[:, i]))
    stacked = jnp.stack(features, axis=1)  # [B, F, width]
    pairs = jnp.einsum("bfd,bgd->bfg", stacked, stacked)
    rows, columns = jnp.tril_indices(len(features), -1)
    x = jnp.concatenate([x, pairs[:, rows, columns]], axis=-1)
    for size in (512, 512, 256):
      x = nn.relu(nn.Dense(size, dtype=self.dtype)(x))
    return nn.Dense(1, dtype=self.dtype)(x)[:, 0]  # [B]


class BERT(nn.Module):
  """Post-norm layers with dropout and a padding mask added to the scores: tokens to logits."""

  width: int = 512
  heads: int = 8
  layers: int = 1
  vocab: int = 8192
  dropout: float = 0.1
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array, padding: jax.Array) -> jax.Array:
    def dense(width: int, x: jax.Array) -> jax.Array:
      return nn.Dense(width, dtype=self.dtype)(x)

    def drop(x: jax.Array) -> jax.Array:
      return nn.Dropout(self.dropout, deterministic=False)(x)

    def norm(x: jax.Array) -> jax.Array:
      return nn.LayerNorm(dtype=self.dtype)(x)

    b, t = tokens.shape
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
    position = self.param("position", nn.initializers.normal(0.02), (t, self.width))
    x = drop(norm(x + position.astype(x.dtype)))
    mask = (1.0 - padding[:, None, None, :]) * -1e9  # f32[B, 1, 1, T]
    size = self.width // self.heads
    for _ in range(self.layers):
      q, k, v = (dense(self.width, x).reshape(b, t, self.heads, size) for _ in range(3))
      scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) / size**0.5 + mask
      weights = drop(nn.softmax(scores).astype(v.dtype))
      mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, self.width)
      x = norm(x + drop(dense(self.width, mixed)))
      x = norm(x + drop(dense(self.width, nn.gelu(dense(4 * self.width, x)))))
    return dense(self.vocab, norm(nn.gelu(dense(self.width, x))))  # [B, T, vocab]


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
    returns_result: whether the loss returns the result, too, as for a measure of accuracy.
  """

  model: Any
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  target: jax.ShapeDtypeStruct
  compare: Callable[[jax.Array, jax.Array], jax.Array]
  returns_result: bool = False

  def variables(self) -> Any:
    """Returns the shapes of parameters, and of running statistics where there are any."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0, impl="rbg")}
    return jax.eval_shape(self.model.init, keys, *self.inputs)

  def batch(self) -> Any:
    """Returns the shapes of a batch, and of the key of its dropout."""
    return {"inputs": self.inputs, "target": self.target, "key": jax.ShapeDtypeStruct((4,), jnp.uint32)}

  def loss(self, dtype: Any = None) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
    """Returns `(params, statistics, batch) -> (loss, statistics)`; cast by hand where given a dtype."""
    model = self.model.clone(dtype=dtype)

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
      variables = {"params": params, **statistics}
      rngs = {"dropout": jax.random.wrap_key_data(batch["key"], impl="rbg")}
      result, new = model.apply(variables, *batch["inputs"], rngs=rngs, mutable=list(statistics))
      result = result.astype(F32)
      return self.compare(result, batch["target"]), (new, result) if self.returns_result else new

    return loss


def _shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _of_tokens(model: Any, batch: int, length: int) -> Example:
  tokens = _shape(batch, length, dtype=I32)
  return Example(model, (tokens,), tokens, _cross_entropy)


def _of_images(model: Any, batch: int, side: int) -> Example:
  return Example(model, (_shape(batch, side, side, 3),), _shape(batch, dtype=I32), _cross_entropy)


EXAMPLES = {
  "transformer": _of_tokens(GPT(512, 8, 2, 256), 16, 512),
  "transformer, scanned": _of_tokens(ScannedGPT(512, 8, 3, 256), 16, 512),
  "transformer, wide and scanned": _of_tokens(ScannedGPT(2048, 16, 4, 256), 2, 256),
  "U-Net": Example(
    UNet(),
    (_shape(64, 64, 64, 3),),
    _shape(64, 64, 64, 3),
    lambda noise, target: jnp.square(noise - target).mean(),
  ),
  "ResNet": _of_images(ResNet(), 256, 32),
  "ConvNeXt": _of_images(ConvNeXt(), 64, 128),
  "LSTM": _of_tokens(LSTM(), 128, 128),
  "state space": _of_tokens(StateSpace(), 32, 512),
  "mixture of experts": _of_tokens(Mixture(), 32, 512),
  "recommender": Example(
    Recommender(),
    (_shape(65_536, 13), _shape(65_536, 4, dtype=I32)),
    _shape(65_536),
    lambda logits, clicks: optax.sigmoid_binary_cross_entropy(logits, clicks).mean(),
  ),
  "autoencoder": Example(
    Autoencoder(),
    (_shape(16_384, 784),),
    _shape(16_384, 784),
    lambda logits, pixels: optax.sigmoid_binary_cross_entropy(logits, pixels).sum(-1).mean(),
  ),
  "transformer, logits returned": Example(
    GPT(512, 8, 1, 8192), (_shape(16, 512, dtype=I32),), _shape(16, 512, dtype=I32), _cross_entropy, True
  ),
  "BERT": Example(
    BERT(), (_shape(64, 256, dtype=I32), _shape(64, 256)), _shape(64, 256, dtype=I32), _cross_entropy
  ),
}
