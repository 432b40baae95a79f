"""A Llama in plain JAX by its sizes, and its training step on a described mesh.

It is written in float32: the policy says what runs in which dtype. Layers are stacked and run in a scan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import Target

AXES = ("data", "fsdp", "tensor")
_ROWS = ("data", "fsdp")  # the axes that divide the batch


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A decoder and how it is trained.

  Attributes:
    dim, layers, heads, kv_heads, hidden, vocab: sizes.
    target: the devices.
    mesh: devices along each of `AXES`; an axis that is not named has one.
    batch, length: sequences of a device, and tokens of a sequence.
    head_dim: entries of a head; `dim / heads` if 0.
    save, offload: names of what the forward pass leaves for the backward pass on the device or on the host;
      `save=["all"]`: nothing is computed again.
    blocks: side of splash attention's blocks.
    loss_rows: how many tokens go through head and loss together; 0 for all.
    mu_dtype: dtype of Adam's first moment.
  """

  dim: int
  layers: int
  heads: int
  kv_heads: int
  hidden: int
  vocab: int
  target: Target
  mesh: dict[str, int]
  batch: int
  length: int
  head_dim: int = 0
  save: Sequence[str] = ()
  offload: Sequence[str] = ()
  blocks: int = 512
  loss_rows: int = 0
  mu_dtype: str = "float32"

  @property
  def width(self) -> int:
    """The entries of all heads' queries."""
    return self.heads * (self.head_dim or self.dim // self.heads)

  def shapes(self) -> dict[str, Any]:
    """The shapes of the parameters, and along which axis of the mesh each dimension is divided."""
    n, dim, kv = self.layers, self.dim, self.width * self.kv_heads // self.heads
    inward = {"query": self.width, "key": kv, "value": kv, "up": self.hidden, "gate": self.hidden}
    outward = {"out": self.width, "down": self.hidden}
    layers: dict[str, Any] = {x: ((n, dim, size), (None, "fsdp", "tensor")) for x, size in inward.items()}
    layers |= {x: ((n, size, dim), (None, "tensor", "fsdp")) for x, size in outward.items()}
    layers |= dict.fromkeys(("norm_1", "norm_2"), ((n, dim), (None, None)))
    embed, head = ((self.vocab, dim), ("tensor", "fsdp")), ((dim, self.vocab), ("fsdp", "tensor"))
    return {"embed": embed, "norm": ((dim,), (None,)), "head": head, "layers": layers}

  def token_flops(self) -> float:
    """Model FLOPs of a token in training: 6 a weight that multiplies, attention counted in full."""
    layers = (math.prod(shape) for shape, _ in self.shapes()["layers"].values() if len(shape) == 3)
    weights = sum(layers) + self.vocab * self.dim  # the head
    return 6.0 * weights + 12.0 * self.layers * self.width * self.length

  def training(self, policy: Any) -> tuple[Any, Any, Any]:
    """A training step under a policy, and the shapes of its state and batch, divided over the mesh."""
    leaf = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._on_mesh(*spec))
    params = jax.tree.map(lambda x: leaf(*x), self.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    rows = self.batch * self.target.devices, self.length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(rows, jnp.int32, sharding=self._on_mesh(_ROWS))}
    adam = optax.adamw(3e-4, b2=0.95, weight_decay=0.1, mu_dtype=self.mu_dtype)
    step = mpjax.make_train_step(self.loss, optax.chain(optax.clip_by_global_norm(1.0), adam), policy)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    state = jax.eval_shape(lambda params, batch: step.init(params, batch=batch), *shapes)
    named = lambda path, leaf: (getattr(path[-1], "key", None), leaf.shape)
    like = {named(*item): item[1].sharding for item in jax.tree.leaves_with_path(params)}
    placed = lambda *item: item[1].update(sharding=like.get(named(*item), self._on_mesh()))
    return step, jax.tree.map_with_path(placed, state), batch

  def _on_mesh(self, *spec: Any) -> NamedSharding:
    target, sizes = self.target, tuple(self.mesh.get(axis, 1) for axis in AXES)
    device = AbstractDevice(target.device, int(target.cuda.get("core_count", 0)), target.kind)
    mesh = AbstractMesh(sizes, AXES, (AxisType.Auto,) * len(AXES), abstract_device=device)
    return NamedSharding(mesh, PartitionSpec(*spec))

  def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross entropy of the next tokens; `batch["tokens"]` is int32 [B, length + 1]."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    with jax.named_scope("embed"):
      x = self._divided(self._embed(params, tokens))
    layer = jax.named_call(self._layer, name="layer")
    if "all" not in self.save:
      names = {"names_which_can_be_saved": self.save, "names_which_can_be_offloaded": self.offload}
      to_host = {"offload_src": "device", "offload_dst": "pinned_host"}
      kept = jax.checkpoint_policies.save_and_offload_only_these_names(**names, **to_host)
      layer = jax.checkpoint(layer, policy=kept, prevent_cse=False)
    x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    x = _norm(x, params["norm"])
    if self.loss_rows:
      return mpjax.linear_cross_entropy(x, params["head"], labels, rows=self.loss_rows)
    with jax.named_scope("head"):
      logits = self._divided(x @ params["head"])
    with jax.named_scope("loss"):
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  def _embed(self, params: Any, tokens: jax.Array) -> jax.Array:
    if self.target.kind == "tpu":  # a product with one-hot rows, as MaxText has it there
      return (tokens[..., None] == jnp.arange(self.vocab)).astype(jnp.float32) @ params["embed"]
    return params["embed"][tokens]

  def _layer(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Adds attention and an MLP to the stream x [B, T, D]."""
    x = _named(x, "decoder_layer_input")
    h = _norm(x, w["norm_1"])
    project = lambda name, heads: _named(
      _linear(h, w, name).reshape(*h.shape[:2], heads, self.width // self.heads), f"{name}_proj"
    )
    q, k, v = project("query", self.heads), project("key", self.kv_heads), project("value", self.kv_heads)
    q, k = _rotate(q), _rotate(k)
    kernel = self._splash if self.target.kind == "tpu" else _stated
    heads = self._on_mesh(_ROWS, None, "tensor", None)
    options: dict[str, Any] = {"mesh": heads.mesh, "out_specs": heads.spec, "check_vma": False}
    with jax.named_scope("attention"):
      attend = mpjax.half_precision(jax.shard_map(kernel, in_specs=(heads.spec,) * 3, **options))
      mixed = attend(q, k, v).reshape(*h.shape[:2], self.width)
    x += _named(self._divided(_linear(mixed, w, "out")), "out_proj")
    h = _norm(x, w["norm_2"])
    up = _named(_linear(h, w, "up"), "mlpwi_1")
    up = up * jax.nn.silu(_named(_linear(h, w, "gate"), "mlpwi_0"))
    return self._divided(x + _named(_linear(up, w, "down"), "mlpwo"))

  def _splash(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of q [B, T, N, H] to k, v [B, T, K, H]; the kernel names what it keeps."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_kernel as kernels,
      splash_attention_mask as masks,
    )

    length, heads, size = q.shape[1:]
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sides: dict[str, Any] = dict.fromkeys(names, min(self.blocks, length))
    blocks = kernels.BlockSizes(**sides, use_fused_bwd_kernel=True)
    options: dict[str, Any] = {"head_shards": 1, "q_seq_shards": 1, "residual_checkpoint_name": "context"}
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    kernel = kernels.make_splash_mha(mask, block_sizes=blocks, **options)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * size**-0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2).astype(q.dtype)

  def _divided(self, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, self._on_mesh(_ROWS, None, "tensor"))


def _linear(x: jax.Array, w: dict[str, jax.Array], name: str) -> jax.Array:
  with jax.named_scope(name):
    return x @ w[name]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  with jax.named_scope("norm"):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _rotate(x: jax.Array) -> jax.Array:
  """Turns pairs of [B, T, N, H] by angles that grow with the position (arXiv 2104.09864)."""
  half = x.shape[-1] // 2
  angles = np.arange(x.shape[1])[:, None, None] * 500_000.0 ** (-np.arange(half) / half)
  cos, sin = jnp.cos(jnp.float32(angles)), jnp.sin(jnp.float32(angles))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _named(x: jax.Array, name: str) -> jax.Array:
  """Names a value that a recomputation policy may keep, in the compute dtype."""
  return mpjax.half_precision(lambda x: checkpoint_name(x, name))(x)


def _stated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Stands for a GPU's fused kernel, which needs its library to compile: for plans alone.

  It has the kernel's operands, results and FLOPs: half of whole attention's, and 2.5 times that backward.
  """
  flops = 2 * math.prod(q.shape) * q.shape[1]
  rows = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
  forward = _kernel("flash_attention", flops, [jax.typeof(q), rows])
  backward = _kernel("flash_attention_backward", 5 * flops // 2, [jax.typeof(x) for x in (q, k, v)])

  def keep(*operands: jax.Array) -> tuple[jax.Array, Any]:
    mixed, rows = (checkpoint_name(x, "context") for x in forward(*operands))
    return mixed, (*operands, mixed, rows)

  attend = jax.custom_vjp(lambda *operands: forward(*operands)[0])
  attend.defvjp(keep, lambda kept, gradient: tuple(backward(*kept, gradient)))
  mixed: jax.Array = attend(q, k, v)
  return mixed


def _kernel(name: str, flops: int, results: list[Any]) -> Any:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
  cost = pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)
  warps = triton.CompilerParams(num_warps=4)
  return pl.pallas_call(lambda *refs: None, shapes, name=name, cost_estimate=cost, compiler_params=warps)
