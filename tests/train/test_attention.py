"""Attention against NumPy in float64 and against JAX's own gradients; its dtypes, residuals and errors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.train.models._attention import attention

HALF = {"bfloat16": 8e-3, "float16": 1e-3}  # twice the unit roundoff


@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradients_are_those_of_numpy_float64(causal):
  q, k, v, weight = qkv("float32", extra=True)
  grads = gradients(causal, weight)(q, k, v)
  want, want_grads = numpy_attention(*(np.asarray(x, np.float64) for x in (q, k, v, weight)), causal)
  np.testing.assert_allclose(attention(q, k, v, causal=causal), want, rtol=1e-5, atol=1e-6)
  for got, expected in zip(grads, want_grads, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_float32_gradients_are_those_of_jax(causal):
  q, k, v, weight = qkv("float32", extra=True)
  theirs = lambda q, k, v: (jax.nn.dot_product_attention(q, k, v, is_causal=causal) * weight).sum()
  got = gradients(causal, weight)(q, k, v)
  for ours, jaxs in zip(got, jax.jit(jax.grad(theirs, (0, 1, 2)))(q, k, v), strict=True):
    assert np.abs(ours - jaxs).max() <= 1e-5 * np.abs(jaxs).max()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", [True, False])
def test_half_attention_and_gradients_are_near_float64(causal, dtype):
  q, k, v, weight = qkv(dtype, extra=True)
  want, want_grads = numpy_attention(*(np.asarray(x, np.float64) for x in (q, k, v, weight)), causal)
  out = attention(q, k, v, causal=causal)
  grads = gradients(causal, weight)(q, k, v)
  for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
    assert got.dtype == dtype
    np.testing.assert_allclose(
      np.asarray(got, np.float64), expected, atol=2 * HALF[dtype] * np.abs(expected).max()
    )


def test_backward_keeps_only_q_k_and_v():
  q, k, v = qkv("bfloat16")
  _, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, causal=True), q, k, v)
  kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.ndim]
  assert sorted(leaf.shape for leaf in kept) == [q.shape] * 3
  assert {leaf.dtype.name for leaf in kept} == {"bfloat16"}


@pytest.mark.parametrize("transform", ["jit", "vmap", "scan", "remat"])
def test_attention_gradients_under_transforms(transform):
  q, k, v = qkv("float32")
  loss = lambda q: jnp.square(attention(q, k, v, causal=True)).sum()
  stack = jnp.stack([q, 2 * q])
  want = jnp.stack([jax.grad(loss)(x) for x in stack])
  got = {
    "jit": lambda: jnp.stack([jax.jit(jax.grad(loss))(x) for x in stack]),
    "vmap": lambda: jax.vmap(jax.grad(loss))(stack),
    "scan": lambda: jax.grad(lambda xs: jax.lax.scan(lambda c, x: (c + loss(x), None), 0.0, xs)[0])(stack),
    "remat": lambda: jnp.stack([jax.grad(jax.checkpoint(loss))(x) for x in stack]),
  }[transform]()
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_attention_of_other_lengths(implementation):
  q, k, v = qkv("float32")
  got = attention(q[:, :2], k, v, causal=False, implementation=implementation)
  np.testing.assert_allclose(got, attention(q, k, v, causal=False)[:, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (
      lambda q, k, v: {"implementation": "flash"},
      "attention='flash': expected one of auto, xla, cudnn, splash",
    ),
    (lambda q, k, v: {"q": q[0]}, r"q\[5, 2, 8\]"),
    (lambda q, k, v: {"k": k[:, :3]}, r"k\[2, 3, 2, 8\]"),
    (lambda q, k, v: {"q": q[..., :4]}, r"expected \[B, T, N, H\] for q"),
    (lambda q, k, v: {"v": v.astype(jnp.bfloat16)}, "v bfloat16: expected one floating dtype"),
    (lambda q, k, v: {n: x.astype(int) for n, x in {"q": q, "k": k, "v": v}.items()}, "q int32"),
  ],
)
def test_attention_refuses(change, match):
  q, k, v = qkv("float32")
  arguments = {"q": q, "k": k, "v": v, "causal": False} | change(q, k, v)
  with pytest.raises(ValueError, match=match):
    attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def qkv(dtype: str, extra: bool = False) -> list[jax.Array]:
  shape = (2, 5, 2, 8)
  return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(3 + extra)]


def gradients(causal: bool, weight: jax.Array) -> Callable[..., tuple[jax.Array, ...]]:
  loss = lambda q, k, v: (attention(q, k, v, causal=causal) * weight).astype(jnp.float32).sum()
  return jax.jit(jax.grad(loss, (0, 1, 2)))


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
