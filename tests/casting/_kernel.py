"""A kernel that takes no float32, losses with it, and the orders of `grad` and `autocast`."""

import jax
import jax.numpy as jnp

import mpjax

KEYS = jax.random.split(jax.random.key(0), 3)
W = {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip(("q", "k", "o"), KEYS, strict=True)}
X = jax.random.normal(jax.random.key(1), (4, 8))


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

  def forward(a, b):
    return mix(a, b), (a, b)

  def backward(kept, ct):
    a, b = kept
    check(a, b, ct)
    y = jnp.tanh(a)
    return ct * b * (1 - y * y), ct * y

  mix.defvjp(forward, backward)
  return mix


def loss_with(mix):
  def loss(w, x):
    return jnp.mean((mix(x @ w["q"], x @ w["k"]) @ w["o"]) ** 2)

  return loss


def exact(w, x):
  return jnp.mean(((jnp.tanh(x @ w["q"]) * (x @ w["k"])) @ w["o"]) ** 2)


def near(found, expected, tolerance=0.03):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    assert jnp.linalg.norm(a - b) <= tolerance * jnp.linalg.norm(b)


ORDERS = {
  "grad of autocast": lambda f, policy: jax.grad(mpjax.autocast(f, policy)),
  "autocast of grad": lambda f, policy: mpjax.autocast(jax.grad(f), policy),
  "jitted": lambda f, policy: jax.jit(jax.grad(mpjax.autocast(jax.jit(f), policy))),
  "jitted inside": lambda f, policy: mpjax.autocast(jax.jit(jax.grad(jax.jit(f))), policy),
}
