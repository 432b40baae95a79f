"""A transformer in plain JAX, Llama or GPT-3 by its sizes, and its training step on a described mesh.

It is written in float32: the policy says what runs in which dtype. Layers are stacked and run in a scan.
"""

from __future__ import annotations

import dataclasses
import math
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
class Sizes:
  """Sizes of a decoder.

  Attributes:
    head_dim: entries of a head; `dim / heads` if 0.
    mlp: `swiglu` or `gelu`.
    norm: `rms`, or `layer` with a bias; with it, every linear layer has a bias.
    positions: length of a table of learned positions; 0 for rotary embeddings.
    tied: whether the head is the embedding.
  """

  dim: int
  layers: int
  heads: int
  kv_heads: int
  hidden: int
  vocab: int
  head_dim: int = 0
  mlp: str = "swiglu"
  norm: str = "rms"
  positions: int = 0
  tied: bool = False

  @property
  def width(self) -> int:
    """Returns the entries of all heads' queries."""
    return self.heads * (self.head_dim or self.dim // self.heads)

  def shapes(self) -> dict[str, Any]:
    """Returns the shapes of the parameters, and along which axis of the mesh each dimension is divided."""
    kv = self.width * self.kv_heads // self.heads
    matrix = lambda rows, columns, *spec: ((self.layers, rows, columns), (None, *spec))
    vector = lambda size, axis=None: ((self.layers, size), (None, axis))
    layers = {
      "query": matrix(self.dim, self.width, "fsdp", "tensor"),
      "key": matrix(self.dim, kv, "fsdp", "tensor"),
      "value": matrix(self.dim, kv, "fsdp", "tensor"),
      "out": matrix(self.width, self.dim, "tensor", "fsdp"),
      "up": matrix(self.dim, self.hidden, "fsdp", "tensor"),
      "down": matrix(self.hidden, self.dim, "tensor", "fsdp"),
      "norm_1": vector(self.dim),
      "norm_2": vector(self.dim),
    }
    if self.mlp == "swiglu":
      layers["gate"] = layers["up"]
    if self.norm == "layer":
      widths = {"query": self.width, "key": kv, "value": kv, "up": self.hidden}
      layers |= {f"{name}_bias": vector(size, "tensor") for name, size in widths.items()}
      layers |= {f"{name}_bias": vector(self.dim) for name in ("out", "down", "norm_1", "norm_2")}
    params = {"embed": ((self.vocab, self.dim), ("tensor", "fsdp")), "norm": ((self.dim,), (None,))}
    if self.norm == "layer":
      params["norm_bias"] = params["norm"]
    if self.positions:
      params["positions"] = ((self.positions, self.dim), (None, "fsdp"))
    if not self.tied:
      params["head"] = ((self.dim, self.vocab), ("fsdp", "tensor"))
    return params | {"layers": layers}

  def token_flops(self, length: int) -> float:
    """Returns model FLOPs of a token in training: 6 a weight that multiplies, attention counted in full."""
    leaves = jax.tree.leaves(self.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    weights = sum(math.prod(shape) for shape, _ in leaves if len(shape) > 1)
    weights -= 0 if self.tied else self.vocab * self.dim  # a table that is only read
    weights -= self.positions * self.dim
    return 6.0 * weights + 12.0 * self.layers * self.width * length


@dataclasses.dataclass(frozen=True)
class Run:
  """How a decoder is trained.

  Attributes:
    length: tokens of a sequence.
    save, offload: names of what the forward pass leaves for the backward pass on the device or on the host;
      `save=("all",)`: nothing is computed again.
    attention: `splash` (a TPU's kernel), `stated` (stands for a GPU's) or `plain`.
    causal: whether a token attends only to those before it; `plain` attention alone can do without.
    blocks: sides of splash attention's blocks of queries and keys.
    one_hot: whether the embedding is a product with one-hot rows.
    loss_rows: how many tokens go through head and loss together; 0 for all.
    mu_dtype: dtype of Adam's first moment.
    clip: largest global norm of the gradients; 0 for none.
  """

  length: int
  save: tuple[str, ...] = ()
  offload: tuple[str, ...] = ()
  attention: str = "splash"
  causal: bool = True
  blocks: int = 512
  one_hot: bool = False
  loss_rows: int = 0
  mu_dtype: str = "float32"
  clip: float = 1.0


class Decoder:
  """The loss of a decoder on a mesh: `Decoder(sizes, run, mesh).loss(params, batch)`.

  Args:
    sizes, run: what to compute.
    mesh: with the axes `AXES`; `None` on one device.
  """

  def __init__(self, sizes: Sizes, run: Run, mesh: AbstractMesh | None = None):
    self.sizes, self.run, self.mesh = sizes, run, mesh

  def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy of the next tokens; `batch["tokens"]` is int32 [B, length + 1]."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    with jax.named_scope("embed"):
      x = self._embed(params, tokens)
    x = self.stream(params, x)
    head = params["embed"].T if self.sizes.tied else params["head"]
    if self.run.loss_rows:
      return mpjax.linear_cross_entropy(x, head, labels, rows=self.run.loss_rows)
    with jax.named_scope("head"):
      logits = self._divided(x @ head, _ROWS, None, "tensor")
    with jax.named_scope("loss"):
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  def stream(self, params: Any, x: jax.Array) -> jax.Array:
    """Returns what the layers and the last norm make of x [B, T, D]."""
    layer = jax.named_call(self._layer, name="layer")
    if self.run.save != ("all",):
      layer = jax.checkpoint(layer, policy=self._policy(), prevent_cse=False)
    x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    return self._norm(x, params["norm"], params.get("norm_bias"))

  def _embed(self, params: Any, tokens: jax.Array) -> jax.Array:
    if self.run.one_hot:
      x = (tokens[..., None] == jnp.arange(self.sizes.vocab)).astype(jnp.float32) @ params["embed"]
    else:
      x = params["embed"][tokens]
    if self.sizes.positions:
      x += params["positions"][: self.run.length]
    return self._divided(x, _ROWS, None, "tensor")

  def _layer(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Adds attention and an MLP to the stream x [B, T, D]."""
    sizes = self.sizes
    x = _named(x, "decoder_layer_input")
    h = self._norm(x, w["norm_1"], w.get("norm_1_bias"))
    project = lambda name, heads: _named(
      self._linear(h, w, name).reshape(*h.shape[:2], heads, sizes.width // sizes.heads), f"{name}_proj"
    )
    q, k, v = project("query", sizes.heads), project("key", sizes.kv_heads), project("value", sizes.kv_heads)
    if not sizes.positions:
      q, k = _rotate(q), _rotate(k)
    with jax.named_scope("attention"):
      mixed = self._attention(q, k, v)
    mixed = mixed.reshape(*h.shape[:2], sizes.width)
    x += _named(self._divided(self._linear(mixed, w, "out"), _ROWS, None, "tensor"), "out_proj")
    h = self._norm(x, w["norm_2"], w.get("norm_2_bias"))
    up = _named(self._linear(h, w, "up"), "mlpwi_1")
    if sizes.mlp == "swiglu":
      up *= jax.nn.silu(_named(self._linear(h, w, "gate"), "mlpwi_0"))
    else:
      up = jax.nn.gelu(up)
    down = _named(self._linear(up, w, "down"), "mlpwo")
    return self._divided(x + down, _ROWS, None, "tensor")

  def _linear(self, x: jax.Array, w: dict[str, jax.Array], name: str) -> jax.Array:
    with jax.named_scope(name):
      y = x @ w[name]
      return y + w[f"{name}_bias"] if f"{name}_bias" in w else y

  def _norm(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    with jax.named_scope("norm"):
      if bias is not None:
        x -= x.mean(-1, keepdims=True)
      x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale
      return x if bias is None else x + bias

  def _attention(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns causal attention of q [B, T, N, H] to k, v [B, T, K, H]; kernels name what they keep."""
    if self.run.attention == "plain":
      return _named(jax.nn.dot_product_attention(q, k, v, is_causal=self.run.causal), "context")
    inner = self._splash if self.run.attention == "splash" else _stated
    spec = PartitionSpec(_ROWS, None, "tensor", None)
    local = jax.shard_map(inner, mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return mpjax.half_precision(local)(q, k, v)

  def _splash(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads, size = q.shape[1:]
    side = min(self.run.blocks, length)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sides: dict[str, Any] = dict.fromkeys(names, side)
    blocks = kernels.BlockSizes(**sides, use_fused_bwd_kernel=True)
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    kernel = kernels.make_splash_mha(
      mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, residual_checkpoint_name="context"
    )
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q * size**-0.5, k, v)]
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first), 1, 2).astype(q.dtype)

  def _policy(self) -> Any:
    policies = jax.checkpoint_policies
    names = {"names_which_can_be_saved": self.run.save, "names_which_can_be_offloaded": self.run.offload}
    places = {"offload_src": "device", "offload_dst": "pinned_host"}
    if self.run.offload:
      return policies.save_and_offload_only_these_names(**names, **places)
    return policies.save_only_these_names(*self.run.save)

  def _divided(self, x: jax.Array, *spec: Any) -> jax.Array:
    if self.mesh is None:
      return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


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
  """Stands for a fused kernel of a GPU, which cannot be compiled without its library: for plans alone.

  It has the kernel's operands, results and FLOPs, half of whole attention's, and 2.5 times that backward; its
  values mean nothing.
  """
  flops = 2 * math.prod(q.shape) * q.shape[1]
  rows = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
  forward = _kernel("flash_attention", flops, [jax.typeof(q), rows])
  backward = _kernel("flash_attention_backward", 5 * flops // 2, [jax.typeof(x) for x in (q, k, v)])

  @jax.custom_vjp
  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return forward(q, k, v)[0]

  def keep(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    mixed, rows = (checkpoint_name(x, "context") for x in forward(q, k, v))
    return mixed, (q, k, v, mixed, rows)

  attend.defvjp(keep, lambda kept, gradient: tuple(backward(*kept, gradient)))
  return attend(q, k, v)


def _kernel(name: str, flops: int, results: list[Any]) -> Any:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  def body(*refs: Any) -> None:
    for ref in refs[-len(results) :]:
      index = (0,) * len(ref.shape)
      ref[index] = jnp.zeros((), ref.dtype)

  return pl.pallas_call(
    body,
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    name=name,
    cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0),
    compiler_params=triton.CompilerParams(num_warps=4),
  )


def training(
  sizes: Sizes, run: Run, target: Target, mesh: dict[str, int], rows: int, policy: Any
) -> tuple[Any, Any, Any]:
  """Returns a training step and the shapes of its state and batch, divided over the mesh.

  Args:
    sizes, run: the decoder, and how it is trained.
    target: the devices.
    mesh: number of devices along each axis; an axis that is not named has one.
    rows: sequences of a batch, all devices together.
    policy: a policy.

  Raises:
    ValueError: if the mesh does not have the target's number of devices.
  """
  counts = tuple(mesh.get(axis, 1) for axis in AXES)
  if math.prod(counts) != target.devices:
    raise ValueError(f"a mesh of {counts} on {target.name}, which has {target.devices} devices")
  device = AbstractDevice(target.device, int(target.cuda.get("core_count", 0)), target.kind)
  abstract = AbstractMesh(counts, AXES, (AxisType.Auto,) * len(AXES), abstract_device=device)
  place = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(abstract, PartitionSpec(*spec))
  )
  params = jax.tree.map(
    lambda given: place(given[0], jnp.float32, *given[1]),
    sizes.shapes(),
    is_leaf=lambda x: isinstance(x, tuple),
  )
  adam = optax.adamw(3e-4, b2=0.95, weight_decay=0.1, mu_dtype=run.mu_dtype)
  tx = optax.chain(optax.clip_by_global_norm(run.clip), adam) if run.clip else adam
  step = mpjax.make_train_step(Decoder(sizes, run, abstract).loss, tx, policy)
  batch = {"tokens": place((rows, run.length + 1), jnp.int32, _ROWS)}
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
  state = jax.eval_shape(lambda params, batch: step.init(params, batch=batch), *shapes)
  specs = {_suffix(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

  def placed(path: Any, leaf: Any) -> Any:
    like = next((specs[key] for n in (2, 1) if (key := _suffix(path[-n:])) in specs), None)
    if like is None or like.shape != leaf.shape:
      return place(leaf.shape, leaf.dtype)
    return leaf.update(sharding=like.sharding)

  return step, jax.tree_util.tree_map_with_path(placed, state), batch


def _suffix(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
