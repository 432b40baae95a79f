"""Attention and its gradients against NumPy in float64; its dtypes and residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# The function of the models, which a user meets as `model.attention`.
from mpjax.zoo.models._attention import attention

HALF = {"bfloat16": 8e-3, "float16": 1e-3}  # twice the unit roundoff
ARRAYS = [np.random.default_rng(i).normal(size=(2, 5, 2, 8)).astype(np.float32) for i in range(4)]


def loss(q, k, v, weight, causal):
  out = attention(q, k, v, causal=causal)
  return (out * weight).astype(jnp.float32).sum(), out


run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), static_argnums=4)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradients_are_those_of_numpy_float64(causal):
  for dtype, tolerance in (("float32", 1e-6), *((name, 2 * roundoff) for name, roundoff in HALF.items())):
    arrays = [x.astype(jnp.dtype(dtype)) for x in ARRAYS]
    want, want_grads = numpy_attention(*(x.astype(np.float64) for x in arrays), causal)
    (_, out), grads = run(*arrays, causal)
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
      assert got.dtype == dtype
      atol = tolerance * np.abs(expected).max()
      np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=10 * tolerance, atol=atol)


def test_backward_keeps_only_q_k_and_v():
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in ARRAYS[:3])
  _, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, causal=True), q, k, v)
  kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.ndim]
  assert sorted(leaf.shape for leaf in kept) == [q.shape] * 3
  assert {leaf.dtype.name for leaf in kept} == {"bfloat16"}


def numpy_attention(q, k, v, d_out, causal):
  """Values and, for the cotangent `d_out`, gradients; loops over batch, head and query."""
  out, d_q, d_k, d_v = (np.zeros_like(x) for x in (q, q, k, v))
  scale = 1 / np.sqrt(q.shape[-1])
  for b, n, t in np.ndindex(q.shape[0], q.shape[2], q.shape[1]):
    seen = slice(0, t + 1 if causal else k.shape[1])
    keys, values = k[b, seen, n], v[b, seen, n]
    p = np.exp(scale * keys @ q[b, t, n])
    p /= p.sum()
    out[b, t, n] = p @ values
    jacobian = np.diag(p) - np.outer(p, p)
    d_score = jacobian @ (values @ d_out[b, t, n])
    d_q[b, t, n] = scale * d_score @ keys
    d_k[b, seen, n] += scale * np.outer(d_score, q[b, t, n])
    d_v[b, seen, n] += np.outer(p, d_out[b, t, n])
  return out, (d_q, d_k, d_v)
