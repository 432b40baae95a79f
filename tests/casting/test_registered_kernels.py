"""Kernels that are registered run in half precision in any program; those that are not are warned of."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

import mpjax
from mpjax.casting import _kernels, register_kernel
from tests.casting._jaxprs import equations, jit
from tests.casting._kernel import ORDERS, W, X, exact, loss_with, near


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
  monkeypatch.setattr(_kernels, "_runs", {})


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


def kernels(fun, *args):
  """Returns for each kernel in a function its name and the dtypes of its operands."""
  found = [e for e in equations(fun, *args) if e.primitive.name == "pallas_call"]
  return [(_kernels.kernel_name(e), [v.aval.dtype.name for v in e.invars]) for e in found]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_with_a_derivative_rule_runs_in_half_precision_in_both_orders(order, policy):
  register_kernel("mix_forward", forward)
  register_kernel("mix_backward", backward)
  half = {"bf16": "bfloat16", "fp16": "float16"}[policy]
  under = ORDERS[order](LOSS, policy)
  found = kernels(under, W, X)
  assert ("mix_forward", [half] * 2) in found
  assert ("mix_backward", [half, half, "float32", half]) in found  # what it keeps in float32 stays
  assert {dtype for name, dtypes in found if name == "mix_forward" for dtype in dtypes} == {half}
  near(*jit(lambda w, x: (under(w, x), jax.grad(exact)(w, x)))(W, X))


def test_a_jitted_function_and_a_primitive_of_ones_own():
  calls = []

  @jax.jit
  def fused(a, b):
    calls.append(a.dtype.name)
    return jnp.tanh(a) * b

  register_kernel("fused", fused)
  near(
    *jit(lambda w, x: (jax.grad(mpjax.autocast(loss_with(fused), "bf16"))(w, x), jax.grad(exact)(w, x)))(W, X)
  )
  assert set(calls) == {"float32", "bfloat16"}

  own_p = Primitive("own_kernel")
  own_p.def_abstract_eval(lambda x: x)
  register_kernel(own_p, lambda x: calls.append(x.dtype.name) or x * 2)
  del calls[:]
  jax.eval_shape(mpjax.autocast(lambda x: own_p.bind(x @ W["q"]), "bf16"), X)
  assert set(calls) == {"bfloat16"}


def test_policies_of_modules_and_full_precision_decide():
  register_kernel("mix_forward", forward)
  register_kernel("mix_backward", backward)
  named = loss_with(jax.named_scope("kernel")(mix))
  for loss, policy in (
    (named, {"base": "bf16", "overrides": {"kernel": "fp32"}}),
    (loss_with(mpjax.full_precision(mix)), "bf16"),
    (named, "fp32"),
  ):
    assert {dtype for _, dtypes in kernels(mpjax.autocast(loss, policy), W, X) for dtype in dtypes} == {
      "float32"
    }


def column_kernel(x_ref, o_ref):
  x = x_ref[...]
  o_ref[...] = x / jnp.sum(jnp.abs(x), axis=0, keepdims=True)


def columns(x):
  return pl.pallas_call(
    column_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), name="columns", interpret=True
  )(x)


def test_what_else_has_the_name_is_another_call():
  @jax.jit
  def gated(x, w):
    return jnp.tanh(x) * w

  register_kernel("gated", lambda x, w: jnp.tanh(x) * w)
  register_kernel("columns", columns)
  register_kernel("kept", lambda x: x * 3)
  register_kernel("silu", columns)
  x = jnp.linspace(-1.0, 1.0, 256).reshape(4, 8, 8)
  functions = {
    # JAX gives the gradient of a jitted function its name, and so a batch of a kernel.
    "gradient": jax.grad(lambda w: jnp.sum(gated(x * 2, w) ** 2)),
    "batch": jax.vmap(columns),
    "name of a value": lambda x: checkpoint_name(x, "kept") + 1,
    "function of a library": lambda x: jax.grad(lambda x: jnp.sum(jax.nn.silu(x)))(x),
  }
  for name, fun in functions.items():
    cast = mpjax.autocast(fun, "bf16")
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", mpjax.PrecisionWarning)
      np.testing.assert_allclose(jax.jit(cast)(x), jax.jit(fun)(x), atol=0.02, err_msg=name)


def test_results_in_no_order_are_refused_and_errors_told():
  register_kernel("mix_forward", lambda a, b: dict(zip("ba", forward(a, b), strict=True)))
  with pytest.warns(mpjax.PrecisionWarning, match="makes another call"):
    assert {dtype for _, dtypes in kernels(mpjax.autocast(LOSS, "bf16"), W, X) for dtype in dtypes} == {
      "float32"
    }

  def misspelt(a, b):
    raise NameError("foward")

  register_kernel("mix_forward", misspelt)
  with pytest.warns(mpjax.PrecisionWarning, match="raises NameError: foward"):
    jax.eval_shape(mpjax.autocast(LOSS, "bf16"), W, X)

  def for_float32(a, b):
    assert a.dtype == jnp.float32
    return forward(a, b)

  register_kernel("mix_forward", for_float32)
  with pytest.warns(mpjax.PrecisionWarning, match="does not take half precision"):
    jax.eval_shape(mpjax.autocast(LOSS, "bf16"), W, X)


def test_a_call_that_is_not_the_kernels_stays_as_it_is():
  register_kernel("mix_forward", lambda a: a)  # another number of operands
  register_kernel("mix_backward", lambda a, b, y, ct: a)  # and of results
  with pytest.warns(mpjax.PrecisionWarning, match="the kernel mix_"):
    found = kernels(jax.grad(mpjax.autocast(LOSS, "bf16")), W, X)
  assert {dtype for _, dtypes in found for dtype in dtypes} == {"float32"}


def test_a_kernel_in_float32_is_warned_of_with_the_line_that_changes_it():
  with pytest.warns(mpjax.PrecisionWarning, match="mix_forward runs in float32.*register_kernel") as caught:
    jax.eval_shape(mpjax.autocast(LOSS, "bf16"), W, X)
  assert [w.filename for w in caught] == [__file__] or sys.version_info < (3, 12)
  [row] = [row for row in mpjax.explain(LOSS, W, X, policy="bf16").rows if row.operands]
  assert "mpjax.half_precision" in row.why
  assert "register_kernel('mix_forward', ...)" in row.why


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


def test_explain_shows_a_registered_kernel_in_half_precision():
  register_kernel("mix_forward", forward)
  [row] = [row for row in mpjax.explain(LOSS, W, X, policy="bf16").rows if row.operands]
  assert (row.operands, row.after, row.why) == (("bfloat16",), "bfloat16", "a registered kernel")


def test_what_leaves_float16s_range_is_infinite():
  register_kernel("mix_forward", forward)
  f = mpjax.autocast(lambda a, b: mix(a * 1e5, b * 1e5), "fp16")
  assert jit(f)(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)).max() == np.inf


def test_nothing_but_a_name_and_a_function_is_taken():
  for kernel, run in ((forward, forward), ("mix_forward", None)):
    with pytest.raises(TypeError, match="expected a name or a primitive, and a function"):
      register_kernel(kernel, run)
