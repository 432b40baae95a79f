"""`saved_activations: fp8` under autocast: a byte an element is kept for the backward pass."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.fp8._programs import SHORT, D, fp8, weights
from tests.fp8._reference import normal

ROWS, CLASSES = 64, 48
X = normal(ROWS, D, seed=3)
W = [*weights(*[D] * 6), normal(D, CLASSES, seed=5) / 6]
LABELS = np.arange(ROWS) % CLASSES


def layer_norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def block(x, up, down):
  return x + jax.nn.gelu(layer_norm(x) @ up) @ down


def mlp(w, x):
  x = x @ w[0]
  for up, down in ((w[1], w[2]), (w[3], w[4])):
    x = block(x, up, down)
  return layer_norm(x) @ w[-1]


def attention(w, x):
  x = x @ w[0]
  scores = jax.nn.softmax((x @ w[1]) @ (x @ w[2]).T / D)
  return layer_norm(block(scores @ x, w[3], w[4])) @ w[-1]


def ending(w, x):
  """A scan at the end of whose step an island stands: the next step's product comes after it."""
  x, _ = jax.lax.scan(lambda x, w: (layer_norm(x @ w), None), x @ w[0], jnp.stack(w[1:4]))
  return x @ w[-1]


NETS = {"mlp": mlp, "end of a step": ending, "attention": attention}


def loss_of(net):
  def loss(w, x):
    logits = net(w, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1).mean()

  return loss


def kept(net, policy):
  """What the backward pass is handed, weights and statistics of rows left out: how many arrays of what shape."""
  cast = lambda x: mpjax.autocast(loss_of(net), policy)(W, x)
  leaves = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(cast, x)[1], X))
  floats = [a for a in leaves if a.dtype != jnp.int32 and a.shape not in ((ROWS,), (2, ROWS), (3, ROWS))]
  return collections.Counter(f"{SHORT[a.dtype.name]}{list(a.shape)}" for a in floats if ROWS in a.shape[-2:])


# What is kept with `compute`, and in FP8; the logits [64, 48] belong to the loss, [64, 64] to the softmax.
KEPT = {
  "mlp": ({"b[64, 32]": 5, "b[64, 48]": 1}, {"8[64, 32]": 4, "b[64, 32]": 1, "b[64, 48]": 1}),
  "end of a step": (
    {"b[3, 64, 32]": 1, "b[64, 48]": 1},
    {"8[3, 64, 32]": 1, "b[64, 48]": 1},
  ),
  "attention": (
    {"b[64, 32]": 5, "b[32, 64]": 1, "b[64, 64]": 1, "b[64, 48]": 1},
    {"8[64, 32]": 2, "b[64, 32]": 3, "b[32, 64]": 1, "b[64, 64]": 1, "b[64, 48]": 1},
  ),
}


def test_what_is_kept_between_products_is_fp8():
  for name, of_name in KEPT.items():
    found = tuple(kept(NETS[name], fp8(saved_activations=saved)) for saved in ("compute", "fp8"))
    assert found == of_name, name
  # Nothing is where nothing is quantised.
  assert kept(mlp, fp8(saved_activations="fp8", overrides={".*": "bf16"})) == kept(mlp, fp8())
