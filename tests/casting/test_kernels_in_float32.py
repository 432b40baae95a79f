"""A kernel that stays in float32 is warned of, with what to write for it."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import mpjax
from tests.casting._kernel import W, X, loss_with


def forward_kernel(a_ref, b_ref, o_ref, sum_ref):
  y = jnp.tanh(a_ref[...].astype(jnp.float32)) * b_ref[...].astype(jnp.float32)
  o_ref[...] = y.astype(o_ref.dtype)
  sum_ref[...] = y


def backward_kernel(a_ref, b_ref, y_ref, ct_ref, da_ref, db_ref):
  a, b, ct = (ref[...].astype(jnp.float32) for ref in (a_ref, b_ref, ct_ref))
  t = jnp.tanh(a)
  da_ref[...] = (ct * b * (1 - t * t) + 0 * y_ref[...]).astype(da_ref.dtype)
  db_ref[...] = (ct * t).astype(db_ref.dtype)


def forward(a, b):
  """Returns the result in the dtype of the operands, and a residual in float32."""
  like = jax.ShapeDtypeStruct(a.shape, a.dtype)
  shapes = (like, jax.ShapeDtypeStruct(a.shape, jnp.float32))
  return pl.pallas_call(forward_kernel, shapes, name="mix_forward", interpret=True)(a, b)


def backward(a, b, y, ct):
  shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype),) * 2
  return pl.pallas_call(backward_kernel, shapes, name="mix_backward", interpret=True)(a, b, y, ct)


@jax.custom_vjp
def mix(a, b):
  return forward(a, b)[0]


def _forward_rule(a, b):
  out, y = forward(a, b)
  return out, (a, b, y)


mix.defvjp(_forward_rule, lambda kept, ct: tuple(backward(*kept, ct)))
LOSS = loss_with(mix)


def test_a_kernel_in_float32_is_warned_of_with_the_line_that_changes_it():
  with pytest.warns(
    mpjax.PrecisionWarning, match="mix_forward runs in float32.*module.function = mpjax.half_precision"
  ) as caught:
    jax.eval_shape(mpjax.autocast(LOSS, "bf16"), W, X)
  assert [w.filename for w in caught] == [__file__] or sys.version_info < (3, 12)
  [row] = [row for row in mpjax.explain(LOSS, W, X, policy="bf16").rows if row.operands]
  assert "mpjax.half_precision" in row.why


@pytest.mark.parametrize(
  ("loss", "policy"),
  [
    (loss_with(mpjax.full_precision(mix)), "bf16"),
    (loss_with(mpjax.half_precision(mix)), "bf16"),
    (LOSS, "fp32"),
  ],
)
def test_nothing_is_said_where_it_is_meant(loss, policy):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.eval_shape(jax.grad(mpjax.autocast(loss, policy)), W, X)


def test_nothing_is_said_of_quantised_operands_and_their_scales():
  def kernel(codes, scale, out):
    out[...] = codes[...].astype(jnp.float32) * scale[...]

  def f(codes, scale):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(codes.shape, scale.dtype))(codes, scale)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.eval_shape(mpjax.autocast(f, "bf16"), np.ones((8, 8), np.int8), np.ones((8, 8), np.float32))
