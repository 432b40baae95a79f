"""A kernel that takes no float32, losses with it, and the orders of `grad` and `autocast`."""

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._conformance import normal

W = {name: jnp.asarray(normal(8, 8, seed=i, scale=1 / 3)) for i, name in enumerate("qko")}
X = jnp.asarray(normal(4, 8, seed=3))


def kernel(seen):
  """A function of two arrays that takes no float32, with a derivative rule; it notes the dtypes it sees."""

  def check(*arrays):
    seen.extend(str(x.dtype) for x in arrays)
    if any(x.dtype == jnp.float32 for x in arrays):
      raise TypeError("this kernel takes half precision alone")

  @jax.custom_vjp
  def mix(a, b):
    check(a, b)
    return jnp.tanh(a) * b

  def backward(kept, ct):
    a, b = kept
    check(a, b, ct)
    y = jnp.tanh(a)
    return ct * b * (1 - y * y), ct * y

  mix.defvjp(lambda a, b: (mix(a, b), (a, b)), backward)
  return mix


def loss_with(mix):
  return lambda w, x: jnp.mean((mix(x @ w["q"], x @ w["k"]) @ w["o"]) ** 2)


exact = loss_with(lambda a, b: jnp.tanh(a) * b)


def near(found, expected, tolerance=0.03):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a), np.asarray(b)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


ORDERS = {
  "grad of autocast": lambda f, policy: jax.grad(mpjax.autocast(f, policy)),
  "autocast of grad": lambda f, policy: mpjax.autocast(jax.grad(f), policy),
  "jitted": lambda f, policy: jax.jit(jax.grad(mpjax.autocast(jax.jit(f), policy))),
  "jitted inside": lambda f, policy: mpjax.autocast(jax.jit(jax.grad(jax.jit(f))), policy),
}
