"""Flax models of the package transformers, from small configurations: one or two layers of width 64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models._model import LENGTH, VOCAB, Model, drawn, next_token, text

WIDTH, HEADS = 64, 4
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1}
SIZES = LAYERS | {"num_attention_heads": HEADS, "vocab_size": VOCAB}


def made(name: str, head: str = "", **config: Any) -> Any:
  """Returns a model without parameters; skips the test where transformers is missing, or has no Flax models."""
  transformers = pytest.importorskip("transformers")
  if not hasattr(transformers, "FlaxPreTrainedModel"):
    pytest.skip("transformers has Flax models up to version 4 only")
  return getattr(transformers, f"Flax{name}{head}")(
    getattr(transformers, f"{name}Config")(**config), _do_init=False
  )


def causal(name: str, head: str = "ForCausalLM", **config: Any) -> Model:
  """Returns a language model that predicts the next token."""
  model = made(name, head, **config)

  def loss(params, batch, key):
    return next_token(model(batch["x"], params=params, dropout_rng=key, train=True).logits, batch["x"])

  return Model(loss, drawn(model.params_shape_tree), {"x": text()})


def gpt2():
  sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": LENGTH}
  return causal("GPT2", "LMHeadModel", **sizes)


def llama():
  # Its table of angles is cut to as many columns as it has positions: no fewer than a head's size twice.
  return causal("Llama", **SIZES | {"max_position_embeddings": 64, "num_hidden_layers": 2})


def bert():
  """Masked tokens, and rows of different lengths."""
  model = made("Bert", "ForMaskedLM", **SIZES, max_position_embeddings=LENGTH)
  tokens = text()
  is_masked = np.random.default_rng(1).random(tokens.shape) < 0.2
  lengths = LENGTH - np.arange(len(tokens))[:, None] // 2
  attended = (np.arange(LENGTH) < lengths).astype(np.int32)
  batch = {"x": np.where(is_masked, 0, tokens), "y": tokens, "attended": attended, "where": is_masked}

  def loss(params, batch, key):
    out = model(batch["x"], batch["attended"], params=params, dropout_rng=key, train=True)
    each = optax.softmax_cross_entropy_with_integer_labels(out.logits, batch["y"])
    return jnp.mean(each, where=batch["where"])

  return Model(loss, drawn(model.params_shape_tree), batch)


MODELS = {"transformers FlaxGPT2": gpt2, "transformers FlaxLlama": llama, "transformers FlaxBert": bert}
