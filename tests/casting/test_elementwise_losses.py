"""The gradient of the last product before a loss by element is made once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

ROWS, D, OUT = 4, 32, 40
rng = np.random.default_rng(0)
drawn = lambda *shape: rng.standard_normal(shape).astype(np.float32)
PARAMS = {"up": drawn(D, D) / 4, "head": drawn(D, OUT) / 4, "bias": np.ones(OUT, np.float32)}
X = drawn(ROWS, D)
Y = (np.arange(ROWS * OUT).reshape(ROWS, OUT) % 3 == 0).astype(np.float32)
squared = lambda out, y: ((out - y) ** 2).mean()
independent_logits = lambda out, y: optax.sigmoid_binary_cross_entropy(out, y).sum(-1).mean()
OPS = mpjax.OpLists.default()


def model(loss):
  return lambda params, x, y: loss(jnp.maximum(x @ params["up"], 0.0) @ params["head"] + params["bias"], y)


def narrow(params, x, y):
  return squared(jnp.maximum(x @ params["head"], 0.0) @ params["head"].T, x)


def halves(params, x, y):
  pairs = zip(jnp.split(x @ params["head"], 2, 1), jnp.split(y, 2, 1), strict=True)
  return sum(squared(out, target) for out, target in pairs)


STORED = {  # the loss, how many gradients are stored, options of autocast
  "squared": (model(squared), 1, {}),
  "independent logits": (model(independent_logits), 1, {}),
  "huber": (model(lambda out, y: optax.huber_loss(out, y).mean()), 1, {}),
  "softmax": (model(lambda out, y: optax.softmax_cross_entropy(out, y).mean()), 0, {}),
  "of rows": (model(lambda out, y: ((out - out.mean(-1, keepdims=True) - y) ** 2).mean()), 0, {}),
  "without targets": (model(lambda out, y: (out**2).mean()), 0, {}),
  "of a small result": (model(lambda out, y: squared(out[:, :1], y[:, :1])), 0, {}),
  "of a result as small as what it is made of": (narrow, 0, {}),
  "of a result that is returned": (model(lambda out, y: (squared(out, y), out)), 0, {}),
  "of another operation which a user allows": (halves, 0, {"ops": OPS.replace(allow=OPS.allow | {"split"})}),
}


@pytest.mark.parametrize("name", STORED)
def test_the_gradient_of_a_loss_by_element_is_stored_and_no_other(name):
  loss, number, options = STORED[name]
  grad = jax.grad(mpjax.autocast(loss, "bf16", **options), has_aux=name.endswith("returned"))
  text = jax.jit(grad).lower(PARAMS, X, Y).as_text()
  stored = re.findall(rf"optimization_barrier.* : tensor<{ROWS}x\d+xbf16>$", text, re.MULTILINE)
  assert len(stored) == number
