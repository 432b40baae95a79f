"""Models of the suite `overhead`, and their training steps by hand, by other libraries and by mpjax.

The models are plain JAX, whose products take the dtype of the parameters. Given float32 parameters a loss is
a plain float32 function, which libraries that cast by themselves are given. Given parameters cast to half
precision it is the same function with careful casts by hand: normalising statistics, softmax and cross
entropy in float32, their results back in half precision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import mpx
import mpx._cast
import mpx._dtypes
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax

VOCAB = 256
TX = optax.adamw(1e-3)
SCALE, PERIOD = 2.0**15, 2000
POLICIES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
HAND = "hand-written"
Loss = Callable[[Any, Any], jax.Array]
# Makes a state of parameters, and takes a step: (state, batch) -> (state, loss or metrics).
Variant = tuple[Callable[[Any], Any], Any]


@dataclasses.dataclass(frozen=True)
class Model:
  """A model to train, and a batch for it.

  Attributes:
    init: makes float32 parameters.
    loss: of parameters and a batch.
    data: makes the batch.
    inner: steps to time at once.
  """

  init: Callable[[], Any]
  loss: Loss
  data: Callable[[], Any]
  inner: int = 1


def transformer(dim: int, heads: int, batch: int, seq: int, layers: int = 4, inner: int = 1) -> Model:
  """A causal transformer over bytes: pre-norm blocks, no biases, GELU."""

  def init() -> Any:
    normal = _normals()
    block = lambda: {
      "qkv": normal(dim, 3 * dim),
      "out": normal(dim, dim),
      "up": normal(dim, 4 * dim),
      "down": normal(4 * dim, dim),
      "gain": jnp.ones((2, dim)),
    }
    ends = {"embed": normal(VOCAB, dim), "position": normal(seq, dim), "head": normal(dim, VOCAB)}
    return ends | {"blocks": [block() for _ in range(layers)]}

  def loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["x"]] + params["position"]
    for block in params["blocks"]:
      x += _attention(_norm(x, block["gain"][0]) @ block["qkv"], heads) @ block["out"]
      x += jax.nn.gelu(_norm(x, block["gain"][1]) @ block["up"]) @ block["down"]
    return _cross_entropy(x @ params["head"], batch["y"])

  def data() -> Any:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, seq + 1)).astype(np.int32)
    return {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}

  return Model(init, loss, data, inner)


def perceptron(sizes: tuple[int, ...], batch: int, inner: int) -> Model:
  """A perceptron with ReLU."""

  def init() -> Any:
    normal = _normals()
    return [{"w": normal(n, m), "b": jnp.zeros(m)} for n, m in itertools.pairwise(sizes)]

  def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params[0]["w"].dtype)
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return _cross_entropy(x @ params[-1]["w"] + params[-1]["b"], batch["y"])

  def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, sizes[0])).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(rng.integers(0, sizes[-1], batch), jnp.int32)}

  return Model(init, loss, data, inner)


def _normals() -> Callable[..., jax.Array]:
  """Draws matrices of variance 1 / rows, each with a key of its own."""
  keys = (jax.random.key(seed) for seed in itertools.count())
  return lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])


def _attention(qkv: jax.Array, heads: int) -> jax.Array:
  """Causal attention, with scores in float32."""
  batch, seq, width = qkv.shape
  q, k, v = (part.reshape(batch, seq, heads, -1) for part in jnp.split(qkv, 3, -1))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
  weights = jax.nn.softmax(jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf))
  return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v).reshape(batch, seq, width // 3)


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
  """Root mean square norm over the last axis, with statistics in float32."""
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  wide = logits.astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


MODELS = {
  "transformer": transformer(dim=256, heads=4, batch=8, seq=128),
  "few tokens": transformer(dim=512, heads=8, batch=1, seq=32, inner=3),
  "tiny perceptron": perceptron((32, 64, 64, 10), batch=64, inner=200),
}


def variants(model: str, dtype: str) -> dict[str, Variant]:
  """The steps of a model in a compute dtype, by name; the first has no loss scale.

  All have one loss and one optimiser, are jitted and donate their state.
  """
  loss = MODELS[model].loss
  half = jnp.dtype(dtype)
  by_hand = lambda params, batch: loss(jax.tree.map(lambda p: p.astype(half), params), batch)
  steps = {HAND: bare(by_hand)}
  if dtype == "bfloat16":
    steps["jmp"] = bare(jmp_casts(loss, half))
  else:
    steps["hand-written loss scale"] = scaled_by_hand(by_hand)
    steps["flax DynamicScale"] = with_flax(by_hand)
    steps["jmp"] = with_jmp(loss, half)
  steps["mpx"] = with_mpx(loss, half)
  if dtype == "float32":
    steps["optax.apply_if_finite (no scale)"] = bare(loss, optax.apply_if_finite(TX, 5))
  if dtype == "float16":
    steps["mpjax.autocast, dynamic_loss_scale"] = with_mpjax(mpjax.autocast(loss, "fp16"))
  found: dict[str, Variant] = {}
  for name, (init, step) in steps.items():
    found[name] = init, jax.jit(step, donate_argnums=0)
  policies: dict[str, Any] = {POLICIES[dtype]: POLICIES[dtype]}
  if dtype == "float32":
    policies["fp32, dynamic"] = {"base": "fp32", "loss_scaling": "dynamic"}
  for name, policy in policies.items():
    whole = mpjax.make_train_step(loss, TX, policy)
    found[f"mpjax.make_train_step {name}"] = whole.init, whole.jitted
  return found


def bare(loss: Loss, tx: optax.GradientTransformation = TX) -> Variant:
  """A step without a loss scale."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, tx.init(params)), step


def scaled_by_hand(loss: Loss) -> Variant:
  """What tutorials write: scale, unscale, look at every gradient, keep the old state by `where`."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (scale, good) = state
    value, grads = jax.value_and_grad(lambda p: loss(p, batch) * scale)(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    kept = _updated(finite, grads, params, opt_state)
    grow = finite & (good + 1 >= PERIOD)
    scaled = jnp.where(grow, scale * 2, jnp.where(finite, scale, jnp.maximum(scale / 2, 1)))
    return (*kept, (scaled, jnp.where(finite & ~grow, good + 1, 0))), value / scale

  return lambda params: (params, TX.init(params), (jnp.float32(SCALE), jnp.int32(0))), step


def with_flax(loss: Loss) -> Variant:
  """The loss scale of flax."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, scale = state
    scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
    return (*_updated(finite, grads, params, opt_state), scale), value

  return lambda params: (params, TX.init(params), DynamicScale(scale=SCALE)), step


def jmp_casts(loss: Loss, dtype: Any) -> Loss:
  """A loss under a policy of jmp."""
  policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
  return lambda params, batch: loss(*policy.cast_to_compute((params, batch)))


def with_jmp(loss: Loss, dtype: Any) -> Variant:
  """The casts and the loss scale of jmp."""
  loss = jmp_casts(loss, dtype)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, leaves = state  # a jmp scale as an argument cannot be lowered ahead of time
    scale = jmp.DynamicLossScale(*leaves)
    value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, batch)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    adjusted = scale.adjust(finite)
    kept = _updated(finite, grads, params, opt_state, jmp.select_tree)
    return (*kept, (adjusted.loss_scale, adjusted.counter)), scale.unscale(value)

  return lambda params: (params, TX.init(params), (jnp.float32(SCALE), jnp.int32(0))), step


def with_mpx(loss: Loss, dtype: Any) -> Variant:
  """The casts and the loss scale of mpx, which always scales."""

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (value, least, counter) = state
    # set_half_precision_datatype("bfloat16") of mpx 0.1.8 changes nothing.
    mpx._dtypes.HALF_PRECISION_DATATYPE = dtype
    scale = mpx.DynamicLossScaling(value, least, factor=2, period=PERIOD, counter=counter)
    loss_value, scale, finite, grads = mpx.filter_value_and_grad(loss, scale)(params, batch)
    params, opt_state = mpx.optimizer_update(params, TX, opt_state, grads, finite)
    return (params, opt_state, (scale.loss_scaling, scale.min_loss_scaling, scale.counter)), loss_value

  scale = jnp.float32(SCALE), jnp.float32(1), jnp.int32(0)
  return lambda params: (params, TX.init(params), scale), step


def with_mpjax(loss: Loss) -> Variant:
  """The loss scale of mpjax in a step of one's own."""
  scaled = mpjax.dynamic_loss_scale(TX, init_scale=SCALE)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state

    def scaled_loss(params: Any) -> Any:
      value = loss(params, batch)
      return mpjax.scale_loss(value, opt_state), value

    (_, value), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    updates, opt_state = scaled.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return lambda params: (params, scaled.init(params)), step


def _where(finite: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def _updated(finite: jax.Array, grads: Any, params: Any, opt_state: Any, select: Any = _where) -> Any:
  """Parameters and state of the optimiser after finite gradients, else as they were."""
  updates, new = TX.update(grads, opt_state, params)
  return select(finite, (optax.apply_updates(params, updates), new), (params, opt_state))
