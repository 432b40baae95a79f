"""Models of Haiku: its own networks (`hk.nets`), and a recurrent one of its layers."""

from __future__ import annotations

import jax
import pytest

from tests.models._model import CLASSES, VOCAB, Model, cross_entropy, drawn, images, next_token, text


def resnet():
  hk = pytest.importorskip("haiku")
  sizes = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (8, 8, 16, 16), "strides": (1, 1, 2, 1)}

  def forward(x):
    return hk.nets.ResNet(num_classes=CLASSES, bottleneck=False, **sizes)(x, is_training=True)

  network = hk.without_apply_rng(hk.transform_with_state(forward))
  batch = images(32, 16, 16, 3)
  params, state = jax.eval_shape(network.init, jax.random.key(0), batch["x"])

  def loss(params, batch, key):
    logits, _ = network.apply(params, batch["state"], batch["x"])
    return cross_entropy(logits, batch["y"])

  return Model(loss, drawn(params), {**batch, "state": drawn(state)})


def lstm():
  hk = pytest.importorskip("haiku")

  def forward(tokens):
    core = hk.DeepRNN([hk.LSTM(64), jax.nn.relu, hk.LSTM(64)])
    x = hk.Embed(VOCAB, 64)(tokens)
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens)), time_major=False)
    return hk.Linear(VOCAB)(x)

  network = hk.without_apply_rng(hk.transform(forward))
  params = jax.eval_shape(network.init, jax.random.key(0), text())

  def loss(params, batch, key):
    return next_token(network.apply(params, batch["x"]), batch["x"])

  return Model(loss, drawn(params), {"x": text()})


MODELS = {"Haiku nets.ResNet": resnet, "Haiku LSTM": lstm}
