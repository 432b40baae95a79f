"""`saved_activations: fp8` under autocast: the same value, and a byte an element kept for the backward pass."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import jit
from tests.fp8._programs import SHORT, D, fp8, weights
from tests.fp8._reference import normal, relative

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("attention", "delayed"), ("end of a step", "current")])
def test_the_value_is_that_of_compute_and_gradients_are_near(name, recipe):
  loss = loss_of(NETS[name])

  def run(saved):
    policy = fp8(recipe=recipe, saved_activations=saved)
    state = mpjax.init_fp8_state(loss, policy)(W, X)
    of = lambda w, state: mpjax.autocast(loss, policy, fp8_state=state)(w, X)
    return jit(jax.value_and_grad(of, (0, 1)))(W, state)

  (value, (grads, state)), (expected, (usual, usual_state)) = run("fp8"), run("compute")
  np.testing.assert_array_equal(value, expected)
  assert 1e-3 < relative(grads, usual) < 0.1
  for site, of in state["amax"].items():
    # Amaxes are of what the backward pass computes again, from rounded activations.
    for operand, bound in {"rhs": 0, "lhs": 2.0**-4, "gradient": 0.2}.items():
      np.testing.assert_allclose(of[operand], usual_state["amax"][site][operand], rtol=bound)


def test_what_is_not_finite_reaches_the_gradients():
  grad = jit(jax.grad(mpjax.autocast(loss_of(mlp), fp8(saved_activations="fp8"))))
  for bad in (np.nan, np.inf):
    x = X.copy()
    x[3, 5] = bad
    assert not any(np.isfinite(g).all() for g in grad(W, x))


def test_a_second_derivative_is_refused_and_says_what_to_write():
  fun = mpjax.autocast(loss_of(mlp), fp8(saved_activations="fp8"))
  along = lambda s: fun(W, s * X)
  for second in (jax.grad(jax.grad(along)), jax.hessian(along)):
    with pytest.raises(NotImplementedError, match="saved_activations: compute"):
      jax.eval_shape(second, 1.0)
