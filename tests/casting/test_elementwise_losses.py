"""The gradient of the last product before a loss by element is made once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

ROWS, D, OUT = 4, 32, 40
PARAMS = {
  "up": jnp.sin(jnp.arange(D * D, dtype=jnp.float32)).reshape(D, D) / 4,
  "head": jnp.cos(jnp.arange(D * OUT, dtype=jnp.float32)).reshape(D, OUT) / 4,
  "bias": jnp.ones(OUT),
}
X = jnp.cos(jnp.arange(ROWS * D, dtype=jnp.float32)).reshape(ROWS, D)
Y = (jnp.arange(ROWS * OUT).reshape(ROWS, OUT) % 3 == 0).astype(jnp.float32)


def squared(out, y):
  return ((out - y) ** 2).mean()


def independent_logits(out, y):
  return optax.sigmoid_binary_cross_entropy(out, y).sum(-1).mean()


def huber(out, y):
  return optax.huber_loss(out, y).mean()


def softmax(out, y):
  return optax.softmax_cross_entropy(out, y).mean()


def of_rows(out, y):
  return ((out - out.mean(-1, keepdims=True) - y) ** 2).mean()


def without_targets(out, y):
  return (out**2).mean()


def with_result(out, y):
  return squared(out, y), out


def model(loss):
  def f(params, x, y):
    return loss(jnp.maximum(x @ params["up"], 0.0) @ params["head"] + params["bias"], y)

  return f


def barriers(f, has_aux=False):
  grad = jax.grad(mpjax.autocast(f, "bf16"), has_aux=has_aux)
  text = jax.jit(grad).lower(PARAMS, X, Y).as_text()
  return re.findall(rf"optimization_barrier.* : tensor<{ROWS}x{OUT}xbf16>$", text, re.MULTILINE)


@pytest.mark.parametrize("loss", [squared, independent_logits, huber], ids=lambda f: f.__name__)
def test_the_gradient_of_a_loss_by_element_is_stored(loss):
  assert len(barriers(model(loss))) == 1


@pytest.mark.parametrize("loss", [softmax, of_rows, without_targets], ids=lambda f: f.__name__)
def test_no_other_is(loss):
  assert not barriers(model(loss))


def test_nor_that_of_a_small_result():
  small = lambda params, x, y: squared(model(lambda out, _: out[:, :1])(params, x, y), y[:, :1])
  assert not barriers(small)
  narrow = lambda params, x, y: squared(jnp.maximum(x @ params["head"], 0.0) @ params["head"].T, x)
  assert not re.findall(
    rf"optimization_barrier.* : tensor<{ROWS}x{D}xbf16>$",
    jax.jit(jax.grad(mpjax.autocast(narrow, "bf16"))).lower(PARAMS, X, Y).as_text(),
    re.MULTILINE,
  )


def test_nor_that_of_a_result_which_is_returned():
  assert not barriers(model(with_result), has_aux=True)


def test_nor_that_of_another_operation_which_a_user_allows():
  ops = mpjax.OpLists.default()
  ops = ops.replace(allow=ops.allow | {"split"})

  def halves(params, x, y):
    pairs = zip(jnp.split(x @ params["head"], 2, 1), jnp.split(y, 2, 1), strict=True)
    return sum(squared(out, target) for out, target in pairs)

  text = jax.jit(jax.grad(mpjax.autocast(halves, "bf16", ops=ops))).lower(PARAMS, X, Y).as_text()
  assert not re.findall(rf"optimization_barrier.* : tensor<{ROWS}x\d+xbf16>$", text, re.MULTILINE)


@pytest.mark.parametrize("loss", [squared, independent_logits], ids=lambda f: f.__name__)
def test_values_and_derivatives_are_those_of_keeping_all(loss):
  def of(recompute):
    f = mpjax.autocast(model(loss), "bf16", recompute=recompute)
    along = lambda s: f(PARAMS | {"bias": s * PARAMS["bias"]}, X, Y)
    one_row = lambda x, y: jax.grad(f)(PARAMS, x[None], y[None])
    return (
      jax.value_and_grad(f)(PARAMS, X, Y),
      jax.jvp(along, (1.0,), (1.0,)),
      jax.hessian(along)(1.0),
      jax.vmap(one_row)(X, Y),
    )

  got, expected = (jax.tree.leaves(jax.jit(lambda how=how: of(how))()) for how in ("islands", "nothing"))
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-8 * np.abs(np.asarray(b)).max())
