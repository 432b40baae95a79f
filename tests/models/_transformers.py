"""Flax models of the package transformers, from small configurations: one or two layers of width 64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models._model import CLASSES, LENGTH, VOCAB, Model, cross_entropy, drawn, images, next_token, text

WIDTH, HEADS, SIDE = 64, 4, 16
LAYER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1}
LAYER["num_attention_heads"] = HEADS
SIZES = {**LAYER, "vocab_size": VOCAB}
TWO_TOWERS = {
  **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
  **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
  **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
  "vocab_size": VOCAB,
  "d_model": WIDTH,
}


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


# A model's table of angles is cut to as many columns as it has positions: they are no fewer than a head's size twice.
POSITIONS = {"max_position_embeddings": 64}


def llama():
  return causal("Llama", **SIZES | POSITIONS | {"num_hidden_layers": 2})


def gemma():
  """Scaled embeddings that are the head, too, and one key head for all queries."""
  heads = {"num_key_value_heads": 1, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
  return causal("Gemma", **SIZES, **POSITIONS, **heads)


def bloom():
  """Distances in place of positions (ALiBi)."""
  sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 1, "n_head": HEADS}
  return causal("Bloom", **sizes, hidden_dropout=0.1, attention_dropout=0.1)


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


def vit():
  dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
  image = {"image_size": SIDE, "patch_size": 4, "num_labels": CLASSES}
  model = made("ViT", "ForImageClassification", **LAYER, **dropout, **image)

  def loss(params, batch, key):
    return cross_entropy(model(batch["x"], params=params, dropout_rng=key, train=True).logits, batch["y"])

  return Model(loss, drawn(model.params_shape_tree), images(8, 3, SIDE, SIDE))


def clip():
  """Two towers, their embeddings normalised, and a contrastive loss with a learned temperature."""
  model = made(
    "CLIP",
    "Model",
    text_config={**SIZES, "max_position_embeddings": LENGTH, "eos_token_id": VOCAB - 1},
    vision_config={**LAYER, "image_size": SIDE, "patch_size": 4},
    projection_dim=32,
  )

  def loss(params, batch, key):
    logits = model(batch["text"], batch["x"], params=params, dropout_rng=key, train=True).logits_per_text
    own = jnp.arange(len(logits))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

  return Model(loss, drawn(model.params_shape_tree), {"text": text(), "x": images(8, 3, SIDE, SIDE)["x"]})


def whisper():
  """Sound through convolutions and an encoder, text from a decoder."""
  lengths = {"max_source_positions": LENGTH, "max_target_positions": LENGTH, "num_mel_bins": 16}
  ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
  config = TWO_TOWERS | lengths | ids | {"dropout": 0.1}
  model = made("Whisper", "ForConditionalGeneration", **config)

  def loss(params, batch, key):
    y = batch["y"]
    return next_token(model(batch["x"], y, params=params, dropout_rng=key, train=True).logits, y)

  return Model(loss, drawn(model.params_shape_tree), {"x": images(8, 16, 2 * LENGTH)["x"], "y": text()})


def wav2vec2():
  """A waveform through convolutions, convolutions with normalised weights for positions, and a CTC loss."""
  convolutions = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
  positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
  norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
  config = SIZES | convolutions | positions | norms | {"num_feat_extract_layers": 2}
  model = made("Wav2Vec2", "ForCTC", **config)

  def loss(params, batch, key):
    logits = model(batch["x"], params=params, dropout_rng=key, train=True).logits  # [B, T, VOCAB]
    labels = batch["y"]
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)).mean()

  batch = {"x": images(4, 640)["x"], "y": 1 + text(4, 8) % (VOCAB - 1)}
  return Model(loss, drawn(model.params_shape_tree), batch)


def regnet():
  """Grouped convolutions, BatchNorm, squeeze and excitation."""
  sizes = {"embedding_size": 16, "hidden_sizes": [16], "depths": [1], "groups_width": 8}
  model = made("RegNet", "ForImageClassification", **sizes, num_labels=CLASSES)
  variables = drawn(model.params_shape_tree)
  statistics = {name: value for name, value in variables.items() if name != "params"}

  def loss(params, batch, key):
    variables = {"params": params, **batch["statistics"]}
    out, _ = model(batch["x"], params=variables, train=True)
    return cross_entropy(out.logits, batch["y"])

  return Model(loss, variables["params"], {**images(32, 3, 16, 16), "statistics": statistics})


MODELS = {
  "transformers FlaxGPT2": gpt2,
  "transformers FlaxLlama": llama,
  "transformers FlaxGemma": gemma,
  "transformers FlaxBloom": bloom,
  "transformers FlaxBert": bert,
  "transformers FlaxViT": vit,
  "transformers FlaxCLIP": clip,
  "transformers FlaxWhisper": whisper,
  "transformers FlaxWav2Vec2": wav2vec2,
  "transformers FlaxRegNet": regnet,
}
