"""The models of the overhead suite as a Keras 3 user writes them, under Keras's own mixed precision.

Keras's layers, its AdamW and, for float16, its LossScaleOptimizer, in the step that Keras's own JAX trainer
makes of them, less the metrics. A state is made from the parameters of the plain-JAX model, so that every
variant starts from the same numbers and computes the same function; where float32 stands inside is Keras's
choice.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.overhead._models import VOCAB

# Keras chooses its backend and writes its settings, to ~/.keras unless told otherwise, when it is imported.
os.environ["KERAS_BACKEND"] = "jax"
with tempfile.TemporaryDirectory() as home:
  os.environ.setdefault("KERAS_HOME", home)
  import keras

  if os.environ["KERAS_HOME"] == home:
    del os.environ["KERAS_HOME"]

Variant = tuple[Callable[[Any], Any], Any]
Weights = dict[str, jax.Array]


def variant(kind: str, settings: dict[str, int], policy: str, platform: str = "cpu") -> Variant:
  """The step of a model under one of Keras's dtype policies: `params -> state`, jitted `(state, batch)`.

  Args:
    kind: transformer, vit or mlp.
    settings: the arguments of the plain-JAX model of that kind.
    policy: float32, mixed_bfloat16 or mixed_float16, which brings the LossScaleOptimizer.
    platform: what the step is to be compiled for: cpu, cuda or tpu.
  """
  network, weights = NETWORKS[kind](policy, platform, **settings)
  optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4, beta_1=0.9, beta_2=0.999, epsilon=1e-8)
  if policy == "mixed_float16":
    optimizer = keras.optimizers.LossScaleOptimizer(
      optimizer, initial_scale=2.0**15, dynamic_growth_steps=2000
    )
  optimizer.build(network.trainable_variables)
  cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  def init(params: Any) -> Any:
    given, wanted = weights(params), network.trainable_variables
    if odd := given.keys() ^ {variable.path for variable in wanted}:
      raise ValueError(f"weights in one of the two models only: {sorted(odd)}")
    # Copies throughout: the state is donated.
    trainable = [jnp.array(given[variable.path]).reshape(variable.shape) for variable in wanted]
    others = network.non_trainable_variables, optimizer.variables
    return trainable, *([jnp.array(variable.value) for variable in group] for group in others)

  def scaled_loss(trainable: Any, fixed: Any, optimizer_state: Any, batch: Any) -> Any:
    logits, fixed = network.stateless_call(trainable, fixed, batch["x"], training=True)
    loss = cross_entropy(batch["y"], logits)
    # Outside a scope the scale is what the Keras variable held at tracing, a constant of the program.
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_state, strict=True))):
      return optimizer.scale_loss(loss), (loss, fixed)

  def step(state: Any, batch: Any) -> Any:
    trainable, fixed, optimizer_state = state
    grad = jax.value_and_grad(scaled_loss, has_aux=True)
    (_, (loss, fixed)), grads = grad(trainable, fixed, optimizer_state, batch)
    trainable, optimizer_state = optimizer.stateless_apply(optimizer_state, grads, trainable)
    return (trainable, fixed, optimizer_state), loss

  return init, jax.jit(step, donate_argnums=0)


def transformer(
  policy: str, platform: str, dim: int, heads: int, layers: int, batch: int, seq: int
) -> tuple[keras.Model, Callable[[Any], Weights]]:
  """The causal transformer, and its weights by path from the parameters of the plain-JAX one."""
  dense = functools.partial(keras.layers.Dense, use_bias=False, dtype=policy)
  tokens = keras.Input((seq,), batch, dtype="int32")
  x = keras.layers.Embedding(VOCAB, dim, dtype=policy, name="embed")(tokens)
  x = Positions(dtype=policy, name="position")(x)
  for i in range(layers):
    x = block(x, i, policy, platform, dim, heads, causal=True)
  model = keras.Model(tokens, dense(VOCAB, name="head")(x))

  def weights(params: Any) -> Weights:
    return encoder_weights(params) | {"embed/embeddings": params["embed"]}

  return model, weights


def vit(
  policy: str,
  platform: str,
  dim: int,
  heads: int,
  layers: int,
  batch: int,
  side: int,
  patch: int,
  classes: int,
) -> tuple[keras.Model, Callable[[Any], Weights]]:
  """The vision transformer, likewise."""
  dense = functools.partial(keras.layers.Dense, use_bias=False, dtype=policy)
  along = side // patch
  images = keras.Input((side, side, 3), batch)
  x = keras.layers.Reshape((along, patch, along, patch, 3), dtype=policy)(images)
  x = keras.layers.Permute((1, 3, 2, 4, 5), dtype=policy)(x)
  x = keras.layers.Reshape((along * along, patch * patch * 3), dtype=policy)(x)
  x = Positions(dtype=policy, name="position")(dense(dim, name="patches")(x))
  for i in range(layers):
    x = block(x, i, policy, platform, dim, heads, causal=False)
  x = keras.layers.GlobalAveragePooling1D(dtype=policy)(x)
  model = keras.Model(images, dense(classes, name="head")(x))

  def weights(params: Any) -> Weights:
    return encoder_weights(params) | {"patches/kernel": params["patches"]}

  return model, weights


def mlp(
  policy: str, platform: str, inputs: int, width: int, layers: int, outputs: int, batch: int
) -> tuple[keras.Model, Callable[[Any], Weights]]:
  """The perceptron, likewise."""
  rows = x = keras.Input((inputs,), batch)
  for i in range(layers):
    x = keras.layers.Dense(width, activation="relu", dtype=policy, name=f"dense_{i}")(x)
  model = keras.Model(rows, keras.layers.Dense(outputs, dtype=policy, name=f"dense_{layers}")(x))

  def weights(params: Any) -> Weights:
    named = {f"dense_{i}/kernel": layer["w"] for i, layer in enumerate(params)}
    return named | {f"dense_{i}/bias": layer["b"] for i, layer in enumerate(params)}

  return model, weights


NETWORKS: dict[str, Callable[..., tuple[Any, Any]]] = {"transformer": transformer, "vit": vit, "mlp": mlp}


class Positions(keras.layers.Layer):
  """Adds a vector learnt for each position."""

  def build(self, shape: Any) -> None:
    self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

  def call(self, x: Any) -> Any:
    return x + self.table


def block(x: Any, i: int, policy: str, platform: str, dim: int, heads: int, causal: bool) -> Any:
  """Attention and a perceptron of 4 dim, each after a norm and beside the residual."""
  dense = functools.partial(keras.layers.Dense, use_bias=False, dtype=policy)
  norm = functools.partial(keras.layers.RMSNormalization, dtype=policy)
  gelu = functools.partial(keras.activations.gelu, approximate=True)
  attend = keras.layers.MultiHeadAttention(
    heads, dim // heads, use_bias=False, dtype=policy, name=f"attention_{i}"
  )
  normed = norm(name=f"norm_{i}_0")(x)
  # The layer calls jax.nn.dot_product_attention, which asks for float16 products that JAX refuses on a CPU
  # and calls unsupported on a TPU; asked for its scores too, it takes a path of its own, softmax in float16.
  if policy == "mixed_float16" and platform != "cuda":
    mixed, _ = attend(normed, normed, use_causal_mask=causal, return_attention_scores=True)
  else:
    mixed = attend(normed, normed, use_causal_mask=causal)
  x = x + mixed
  hidden = dense(4 * dim, activation=gelu, name=f"up_{i}")(norm(name=f"norm_{i}_1")(x))
  return x + dense(dim, name=f"down_{i}")(hidden)


def encoder_weights(params: Any) -> Weights:
  """What the transformers share, by path; the layers take matrices as [rows, heads, columns] and so on."""
  found = {"position/table": params["position"], "head/kernel": params["head"]}
  for i, given in enumerate(params["blocks"]):
    parts = zip(("query", "key", "value"), jnp.split(given["qkv"], 3, -1), strict=True)
    found |= {f"attention_{i}/{name}/kernel": part for name, part in parts}
    found |= {f"norm_{i}_{j}/scale": given["gain"][j] for j in range(2)}
    found |= {f"attention_{i}/attention_output/kernel": given["out"]}
    found |= {f"up_{i}/kernel": given["up"], f"down_{i}/kernel": given["down"]}
  return found
