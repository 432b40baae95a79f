"""Models of the overhead suite: plain JAX, whose matrix products take the dtype of the parameters.

Given float32 parameters a loss is a plain float32 function, which is what libraries that cast by themselves
are given. Given parameters cast to half precision it is the same function with careful casts by hand:
normalising statistics, softmax and cross entropy in float32, their results back in half precision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB = 256


@dataclasses.dataclass(frozen=True)
class Model:
  """A model to train.

  Attributes:
    title: what it is, in the report.
    bound: by what a step on a CPU is bound: products, optimiser, dispatch.
    kind: transformer, vit or mlp.
    settings: the arguments of the function of that kind.
    inner: steps to time at once.
    scanned: steps in one program; 0 for a program of one step.
  """

  title: str
  bound: str
  kind: str
  settings: dict[str, int]
  inner: int = 1
  scanned: int = 0

  def build(self) -> tuple[Callable[[], Any], Callable[[Any, Any], jax.Array], Callable[[], Any]]:
    """`init() -> params`, `loss(params, batch) -> float32[]` and `batch()`."""
    return KINDS[self.kind](**self.settings)


def transformer(
  dim: int, heads: int, layers: int, batch: int, seq: int
) -> tuple[Callable[[], Any], Callable[[Any, Any], jax.Array], Callable[[], Any]]:
  """A causal transformer over bytes: pre-norm blocks, no biases, GELU."""

  def init() -> Any:
    normal = normals(0, 4 * layers + 3)
    return {
      "embed": normal(VOCAB, dim),
      "position": normal(seq, dim),
      "blocks": [block_params(normal, dim) for _ in range(layers)],
      "head": normal(dim, VOCAB),
    }

  def loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["x"]] + params["position"]
    for block in params["blocks"]:
      x = apply_block(block, x, heads, causal=True)
    return cross_entropy(x @ params["head"], batch["y"])

  def data() -> Any:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, seq + 1)).astype(np.int32)
    return {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}

  return init, loss, data


def vit(
  dim: int, heads: int, layers: int, batch: int, side: int, patch: int, classes: int
) -> tuple[Callable[[], Any], Callable[[Any, Any], jax.Array], Callable[[], Any]]:
  """A vision transformer: the same blocks over patches of an image, the mean over tokens, a head."""
  along = side // patch

  def init() -> Any:
    normal = normals(0, 4 * layers + 3)
    return {
      "patches": normal(patch * patch * 3, dim),
      "position": normal(along * along, dim),
      "blocks": [block_params(normal, dim) for _ in range(layers)],
      "head": normal(dim, classes),
    }

  def loss(params: Any, batch: Any) -> jax.Array:
    images = batch["x"].astype(params["patches"].dtype)
    x = images.reshape(len(images), along, patch, along, patch, 3).swapaxes(2, 3)
    x = x.reshape(len(images), along * along, -1) @ params["patches"] + params["position"]
    for block in params["blocks"]:
      x = apply_block(block, x, heads, causal=False)
    return cross_entropy(x.mean(1) @ params["head"], batch["y"])

  def data() -> Any:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(batch, side, side, 3)).astype(np.float32)
    return {"x": jnp.asarray(images), "y": jnp.asarray(rng.integers(0, classes, batch), jnp.int32)}

  return init, loss, data


def mlp(
  inputs: int, width: int, layers: int, outputs: int, batch: int
) -> tuple[Callable[[], Any], Callable[[Any, Any], jax.Array], Callable[[], Any]]:
  """A perceptron with `layers` hidden layers and ReLU."""
  sizes = (inputs, *[width] * layers, outputs)

  def init() -> Any:
    normal = normals(0, layers + 1)
    pairs = itertools.pairwise(sizes)
    return [{"w": normal(before, after), "b": jnp.zeros(after)} for before, after in pairs]

  def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params[0]["w"].dtype)
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], batch["y"])

  def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, inputs)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(rng.integers(0, outputs, batch), jnp.int32)}

  return init, loss, data


def block_params(normal: Callable[..., jax.Array], dim: int) -> dict[str, jax.Array]:
  return {
    "qkv": normal(dim, 3 * dim),
    "out": normal(dim, dim),
    "up": normal(dim, 4 * dim),
    "down": normal(4 * dim, dim),
    "gain": jnp.ones((2, dim)),
  }


def apply_block(block: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
  """x: [B, T, D]; attention and a perceptron of 4 D, each after a norm and beside the residual."""
  batch, seq, dim = x.shape
  qkv = norm(x, block["gain"][0]) @ block["qkv"]
  q, k, v = (part.reshape(batch, seq, heads, dim // heads) for part in jnp.split(qkv, 3, -1))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(dim // heads)
  if causal:
    scores = jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
  x = x + mixed.reshape(x.shape) @ block["out"]
  return x + jax.nn.gelu(norm(x, block["gain"][1]) @ block["up"]) @ block["down"]


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
  """Root mean square norm over the last axis, with statistics in float32."""
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  wide = logits.astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


def normals(seed: int, count: int) -> Callable[..., jax.Array]:
  """Draws matrices of variance 1 / rows, each with a key of its own."""
  keys: Iterator[jax.Array] = iter(jax.random.split(jax.random.key(seed), count))
  return lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])


KINDS: dict[str, Callable[..., tuple[Any, Any, Any]]] = {"transformer": transformer, "vit": vit, "mlp": mlp}

# Trained here.
SMALL = {
  "transformer": Model(
    "transformer, 3.3M parameters, 1024 tokens: bound by matrix products",
    "products",
    "transformer",
    {"dim": 256, "heads": 4, "layers": 4, "batch": 8, "seq": 128},
  ),
  "vit": Model(
    "ViT, 3.2M parameters, 16 images of 64 tokens: bound by matrix products",
    "products",
    "vit",
    {"dim": 256, "heads": 4, "layers": 4, "batch": 16, "side": 64, "patch": 8, "classes": 100},
  ),
  "mlp": Model(
    "perceptron, 2.9M parameters, 512 rows: bound by matrix products",
    "products",
    "mlp",
    {"inputs": 784, "width": 1024, "layers": 3, "outputs": 10, "batch": 512},
  ),
  "transformer_opt": Model(
    "transformer, 12.9M parameters, 32 tokens: bound by the optimiser",
    "optimiser",
    "transformer",
    {"dim": 512, "heads": 8, "layers": 4, "batch": 1, "seq": 32},
    inner=3,
  ),
  "mlp_tiny": Model(
    "perceptron, 7k parameters: bound by dispatch",
    "dispatch",
    "mlp",
    {"inputs": 32, "width": 64, "layers": 2, "outputs": 10, "batch": 64},
    inner=200,
  ),
  "mlp_tiny_scan": Model(
    "the same perceptron, 500 steps in one program",
    "dispatch",
    "mlp",
    {"inputs": 32, "width": 64, "layers": 2, "outputs": 10, "batch": 64},
    scanned=500,
  ),
}
# Compiled for accelerators: the same functions in sizes that fill one.
LARGE = {
  "transformer": Model(
    "transformer, 768 wide, 4 layers, 16 rows of 512 tokens",
    "products",
    "transformer",
    {"dim": 768, "heads": 12, "layers": 4, "batch": 16, "seq": 512},
  ),
  "vit": Model(
    "ViT, 384 wide, 6 layers, 32 images of 224 x 224",
    "products",
    "vit",
    {"dim": 384, "heads": 6, "layers": 6, "batch": 32, "side": 224, "patch": 16, "classes": 1000},
  ),
  "mlp": Model(
    "perceptron, 2048 wide, 4 layers, 4096 rows",
    "products",
    "mlp",
    {"inputs": 2048, "width": 2048, "layers": 4, "outputs": 1000, "batch": 4096},
  ),
}
