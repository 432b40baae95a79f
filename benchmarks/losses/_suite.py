"""What losses and masks cost under autocast, beside float32 and careful casts by hand: compiled, not run.

    python scripts/bench.py losses cuda|tpu [--case NAME] [--dtype bfloat16|float16] [--json FILE]

The gradient of the loss for an H200 or a TPU v5e, without the device: temporary memory and, for the TPU,
bytes accessed. A loss is one of 32 x 128 logits over 35,008 classes, behind a layer of 512 and its norm. A
mask is that of two layers of attention (512 wide, 8 heads, 512 tokens, batch 16). By hand, products and what
lies between them are in half precision; norms, softmax and loss in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.autocast._suite import POLICIES, target_device  # isort: skip (sets JAX up for its target)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks._record import compiler_figures, origin

Arrays = dict[str, Any]
ROWS, TOKENS, WIDTH, CLASSES = 32, 128, 512, 35_008
BATCH, LENGTH, HEADS, LAYERS = 16, 512, 8, 2
EXPERTS, CAPACITY = 16, 640


@dataclasses.dataclass(frozen=True)
class Case:
  """A model, `(params, batch, dtype) -> loss`, cast by hand where a dtype is given; shapes of its inputs."""

  loss: Callable[[Arrays, Arrays, Any], jax.Array]
  params: Mapping[str, tuple[int, ...]]
  batch: Mapping[str, tuple[tuple[int, ...], Any]]


def layer_norm(x: jax.Array) -> jax.Array:
  """Normalises rows in float32; the result has the dtype of `x`."""
  wide = x.astype(jnp.float32)
  centred = wide - wide.mean(-1, keepdims=True)
  return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def cast(tree: Arrays, dtype: Any) -> Arrays:
  """Casts the floating arrays, unless the dtype is `None`."""
  to = lambda x: x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x
  return jax.tree.map(to, tree)


def with_loss(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Case:
  """A layer, its norm, a head and a loss of float32 logits [B, T, V] and labels [B, T]."""

  def model(params: Arrays, batch: Arrays, dtype: Any) -> jax.Array:
    p, b = cast(params, dtype), cast(batch, dtype)
    logits = layer_norm(jax.nn.gelu(b["x"] @ p["up"])) @ p["head"]
    return loss(logits.astype(jnp.float32), b["labels"])

  return Case(
    model,
    {"up": (WIDTH, WIDTH), "head": (WIDTH, CLASSES)},
    {"x": ((ROWS, TOKENS, WIDTH), jnp.float32), "labels": ((ROWS, TOKENS), jnp.int32)},
  )


def with_mask(
  masked: Callable[[jax.Array, Arrays], jax.Array], dropout: float = 0.0, **batch: tuple[tuple[int, ...], Any]
) -> Case:
  """Layers of attention whose float32 scores [B, H, T, T] go through `masked(scores, batch)`."""

  def model(params: Arrays, arrays: Arrays, dtype: Any) -> jax.Array:
    p, b = cast(params, dtype), cast(arrays, dtype)
    x = b["x"]
    for i in range(LAYERS):
      q, k, v = jnp.moveaxis((layer_norm(x) @ p[f"qkv{i}"]).reshape(BATCH, LENGTH, 3, HEADS, -1), 2, 0)
      scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
      weights = jax.nn.softmax(masked(scores, b)).astype(v.dtype)
      if dropout:
        keep = jax.random.bernoulli(jax.random.key(i), 1 - dropout, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout), 0)
      x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p[f"out{i}"]
    return (x.astype(jnp.float32) ** 2).mean()

  shapes = {f"qkv{i}": (WIDTH, 3 * WIDTH) for i in range(LAYERS)}
  shapes |= {f"out{i}": (WIDTH, WIDTH) for i in range(LAYERS)}
  return Case(model, shapes, {"x": ((BATCH, LENGTH, WIDTH), jnp.float32), **batch})


def experts() -> Case:
  """A mixture of experts whose dispatch and combination are one-hots over expert and place in its queue."""

  def model(params: Arrays, batch: Arrays, dtype: Any) -> jax.Array:
    p, b = cast(params, dtype), cast(batch, dtype)
    x = layer_norm(b["x"] @ p["in"])
    gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)  # [N, E]
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(jnp.int32) - 1
    dispatch = chosen[:, :, None] * jax.nn.one_hot(place, CAPACITY)[:, None, :]  # [N, E, C]
    combine = dispatch * (gates * chosen).sum(-1)[:, None, None]
    inputs = jnp.einsum("nec,nd->ecd", dispatch.astype(x.dtype), x)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, p["up"]))
    out = jnp.einsum("nec,ecd->nd", combine.astype(x.dtype), jnp.einsum("ecf,efd->ecd", hidden, p["down"]))
    return (out.astype(jnp.float32) ** 2).mean()

  params: dict[str, tuple[int, ...]] = {"in": (WIDTH, WIDTH), "router": (WIDTH, EXPERTS)}
  params |= {"up": (EXPERTS, WIDTH, WIDTH), "down": (EXPERTS, WIDTH, WIDTH)}
  return Case(model, params, {"x": ((BATCH * LENGTH, WIDTH), jnp.float32)})


def by_gather(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """The logarithm of the softmax, and one of each row."""
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def with_z_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Cross entropy, and the squared logarithm of the softmax's sum."""
  total = jax.nn.logsumexp(logits, axis=-1)
  right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  return (total - right + 1e-4 * total**2).mean()


def soft_capped(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Cross entropy of logits between -30 and 30."""
  return of_integers(30 * jnp.tanh(logits / 30), labels)


def by_iota(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """The logarithm of the softmax where the class is the label."""
  hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
  return -jnp.where(hit, jax.nn.log_softmax(logits), 0).sum(-1).mean()


def of_integers(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """optax's cross entropy of integer labels."""
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_one_hots(smoothing: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """optax's cross entropy of one-hot labels."""

  def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    targets = jax.nn.one_hot(labels, logits.shape[-1])
    if smoothing:
      targets = optax.smooth_labels(targets, smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean()

  return loss


def causal(scores: jax.Array, batch: Arrays) -> jax.Array:
  return jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)


def sliding(scores: jax.Array, batch: Arrays) -> jax.Array:
  near = jnp.tri(LENGTH, dtype=bool) & ~jnp.tri(LENGTH, k=-128, dtype=bool)
  return jnp.where(near, scores, -jnp.inf)


def segments(scores: jax.Array, batch: Arrays) -> jax.Array:
  ids = batch["segments"]
  same = (ids[:, :, None] == ids[:, None, :]) & jnp.tri(LENGTH, dtype=bool)
  return jnp.where(same[:, None], scores, -1e30)


def boolean(scores: jax.Array, batch: Arrays) -> jax.Array:
  return jnp.where(batch["mask"], scores, -1e30)


def additive(scores: jax.Array, batch: Arrays) -> jax.Array:
  return scores + jnp.where(batch["padding"], 0.0, -1e9)[:, None, None, :]


CASES: dict[str, Callable[[], Case]] = {
  "integer labels": lambda: with_loss(of_integers),
  "take_along_axis": lambda: with_loss(by_gather),
  "z-loss": lambda: with_loss(with_z_loss),
  "soft-capped": lambda: with_loss(soft_capped),
  "one-hot labels": lambda: with_loss(of_one_hots(0.0)),
  "smoothed labels": lambda: with_loss(of_one_hots(0.1)),
  "iota == label": lambda: with_loss(by_iota),
  "causal mask": lambda: with_mask(causal),
  "sliding window": lambda: with_mask(sliding),
  "segment ids": lambda: with_mask(segments, segments=((BATCH, LENGTH), jnp.int32)),
  "boolean mask": lambda: with_mask(boolean, mask=((BATCH, 1, LENGTH, LENGTH), jnp.bool_)),
  "additive mask": lambda: with_mask(additive, padding=((BATCH, LENGTH), jnp.bool_)),
  "dropout mask": lambda: with_mask(causal, dropout=0.1),
  "mixture of experts": experts,
}


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the compiler's figures of every case in float32, cast by hand and under autocast."""
  device = target_device(options.target)
  sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
  like = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  shown = f"{device.device_kind}, described and not there"
  report = origin(f"losses {options.target} --dtype {options.dtype}", "optax", device=shown) | {"cases": {}}
  heads = "".join(f"{name:>22}" for name in ("float32", "hand", "autocast"))
  print(f"{f'{options.dtype}, {shown}':44}{heads}", flush=True)
  for name in options.case or CASES:
    case = CASES[name]()
    params = {key: like(shape) for key, shape in case.params.items()}
    batch = {key: like(*entry) for key, entry in case.batch.items()}
    plain = lambda p, b, case=case: case.loss(p, b, None)
    variants = {
      "float32": plain,
      "hand": lambda p, b, case=case: case.loss(p, b, jnp.dtype(options.dtype)),
      "autocast": mpjax.autocast(plain, POLICIES[options.dtype]),
    }
    rows = report["cases"][name] = {}
    for variant, loss in variants.items():
      figures = compiler_figures(jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile())
      rows[variant] = {key: figures[key] for key in ("temp_bytes", "bytes_accessed")}
    cells = (f"{r['temp_bytes'] / 1e6:10.1f} MB {r['bytes_accessed'] / 1e9:6.2f} GB" for r in rows.values())
    print(f"  {name:42}" + " ".join(cells), flush=True)
  return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the suite's options."""
  parser.add_argument("target", choices=("cuda", "tpu"), help="the device to compile for")
  parser.add_argument("--dtype", choices=POLICIES, default="bfloat16")
  parser.add_argument("--case", choices=CASES, action="append", help="leave the others out; may repeat")
