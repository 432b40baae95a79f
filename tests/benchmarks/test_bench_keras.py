"""Keras's models in the overhead suite: the same function as the plain-JAX models, in the dtypes they say."""

import importlib.util
import re

import jax
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs Keras")

SIZES = {
  "transformer": {"dim": 16, "heads": 2, "layers": 1, "batch": 2, "seq": 8},
  "vit": {"dim": 16, "heads": 2, "layers": 1, "batch": 2, "side": 8, "patch": 4, "classes": 5},
  "mlp": {"inputs": 12, "width": 16, "layers": 2, "outputs": 5, "batch": 4},
}


@pytest.fixture
def models():
  """The plain-JAX models and Keras's."""
  from benchmarks.overhead import _keras, _models

  return _models, _keras


def count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_keras_trains_the_plain_jax_model(models, kind):
  plain, keras = models
  make, loss, data = plain.KINDS[kind](**SIZES[kind])
  params, batch = make(), data()
  tx = optax.adamw(1e-3)

  @jax.jit
  def by_hand(state, batch):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  init, step = keras.variant(kind, SIZES[kind], "float32")
  state, expected = init(params), (params, tx.init(params))
  assert count(state[0]) == count(params)
  for rtol in (1e-5, 1e-4, 1e-4, 1e-4, 1e-4):
    state, value = step(state, batch)
    expected, reference = by_hand(expected, batch)
    np.testing.assert_allclose(value, reference, rtol=rtol)


@pytest.mark.parametrize(("kind", "policy"), [("transformer", "mixed_float16"), ("vit", "mixed_bfloat16")])
def test_keras_multiplies_in_half_precision(models, kind, policy):
  plain, keras = models
  make, _, data = plain.KINDS[kind](**SIZES[kind])
  init, step = keras.variant(kind, SIZES[kind], policy)
  lowered = step.lower(jax.eval_shape(init, jax.eval_shape(make)), jax.eval_shape(data)).as_text()
  products = re.findall(r"dot_general.*: \((.*)\) ->", lowered)
  half = {"mixed_float16": "f16", "mixed_bfloat16": "bf16"}[policy]
  assert products
  assert all(f"x{half}>" in operands for operands in products)


def test_keras_leaves_the_weights_alone_when_float16_overflows(models):
  plain, keras = models
  make, _, data = plain.KINDS["mlp"](**SIZES["mlp"])
  init, step = keras.variant("mlp", SIZES["mlp"], "mixed_float16")
  state = init(jax.tree.map(lambda p: p * 1e5, make()))
  weights, _, optimizer = jax.tree.map(np.array, state)
  (new_weights, _, new_optimizer), _ = step(state, data())
  for before, after in zip(weights, new_weights, strict=True):
    np.testing.assert_array_equal(after, before)
  changed = [
    (float(a), float(b)) for a, b in zip(optimizer, new_optimizer, strict=True) if not np.array_equal(a, b)
  ]
  assert changed == [(2.0**15, 2.0**14)]
