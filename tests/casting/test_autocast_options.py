"""What users decide under autocast: regions, lists, accumulation, recomputation, dtypes of their own, literals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import (
  dtypes,
  lowered_products,
  multiplied,
  named,
  run_together,
)

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
HALF = {"bf16": "bf16", "fp16": "f16"}
BF16 = mpjax.autocast(policy="bf16")
FP16 = mpjax.autocast(policy="fp16")
FULL = mpjax.full_precision
OPS = mpjax.OpLists.default()


def close(got, want, policy="bf16"):
  assert [*leaf_failures("output", got, want, TOLERANCE[policy])] == []


def test_full_precision_leaves_a_region_in_float32_backward_too():
  region = FULL(lambda w, x: jnp.tanh(x @ w) @ w)
  loss = lambda w, x: jnp.sum(region(w, x @ w) @ w)
  for policy, half in HALF.items():
    cast = mpjax.autocast(loss, policy)
    assert lowered_products(cast, W, X) == {f"{half} {half}": 2, "f32 f32": 2}
    # The two of the region have two gradients each, the last has two, and the first has one for w.
    assert lowered_products(jax.grad(cast), W, X) == {f"{half} {half}": 4, "f32 f32": 6}
  results, _ = run_together({"cast": jax.grad(BF16(loss)), "plain": jax.grad(loss)}, W, X)
  close(results["cast"], results["plain"])


def test_full_precision_is_exact_and_does_nothing_without_autocast():
  f = lambda x: jax.nn.softmax(x @ W, axis=-1) @ W
  results, _ = run_together({"cast": BF16(FULL(f)), "plain": f}, X)
  np.testing.assert_allclose(results["cast"], results["plain"], rtol=1e-6)
  assert str(jax.make_jaxpr(FULL(f))(X)) == str(jax.make_jaxpr(f)(X))


# Lists


def test_lists_have_defaults_and_replace_moves_a_name():
  for listed, names in {
    "allow": "dot_general conv_general_dilated ragged_dot_general",
    "deny": "exp log pow cumsum reduce_sum erf_inv lu fft",
    "infer": "add mul max reshape select_n",
    "opaque": "pallas_call pure_callback ffi_call random_bits",
  }.items():
    assert set(names.split()) <= getattr(OPS, listed), listed
  assert hash(mpjax.OpLists.default()) == hash(OPS)
  ops = OPS.replace(deny=OPS.deny | {"tanh", "my_primitive"})
  assert ops.deny == OPS.deny | {"tanh", "my_primitive"}
  assert "tanh" not in ops.infer | ops.deny_float16
  assert ops.allow == OPS.allow
  moved = OPS.replace(allow=OPS.allow | {"add"}, deny=OPS.deny - {"exp"})
  assert "add" in moved.allow - moved.infer
  assert "exp" in moved.infer
  assert mpjax.OpLists.default() == OPS
  for lists, message in (
    ({"denied": {"exp"}}, "'denied'.*did you mean 'deny'"),
    ({"allow": {"exp"}, "deny": {"exp"}}, "'exp' is on two lists"),
    ({"deny": "exp"}, r"deny='exp'.*set of names.*\{'exp'\}"),
    ({"deny": {jnp.exp}}, "deny=.*names of primitives"),
  ):
    with pytest.raises(ValueError, match=message):
      OPS.replace(**lists)


# Accumulation and recomputation


def test_accum_dtype_is_the_dtype_of_products():
  for policy, half in HALF.items():
    cast = mpjax.autocast(lambda x: (x @ W) @ W, {"base": policy, "accum_dtype": "float32"})
    for equation in named("dot_general", cast, X):
      assert multiplied(equation) == f"{half} {half}"
      assert dtypes(equation.outvars) == "f32"
      assert equation.params["preferred_element_type"] == np.float32
    assert set(lowered_products(cast, X)) == {f"{half} {half}"}
    gradient = run_together({"": jax.grad(lambda x, cast=cast: cast(x).sum())}, X)[0][""]
    close(gradient, np.ones_like(X) @ W.T @ W.T, policy)


def test_matmul_precision_of_a_policy():
  cast = mpjax.autocast(lambda x: x @ W, {"base": "fp32", "matmul_precision": "highest"})
  assert "precision = [HIGHEST, HIGHEST]" in jax.jit(cast).lower(X).as_text()


def test_recomputation_saves_less():
  deep = lambda x: jnp.sum(jax.nn.gelu(jax.nn.softmax(jax.nn.gelu(x @ W) @ W) @ W) @ W)
  casts = [mpjax.autocast(deep, "bf16", recompute=how) for how in ("islands", "nothing")]
  kept = lambda fun: jax.eval_shape(lambda x: jax.tree.leaves(jax.vjp(fun, x)[1]), normal(256, 4))
  saved = [sum(x.size * x.dtype.itemsize for x in kept(fun)) for fun in (*casts, deep)]
  assert saved[0] < saved[1] < saved[2]


# Dtypes of the user's own

bf16, f16 = (lambda x: x.astype(jnp.bfloat16)), (lambda x: x.astype(jnp.float16))
widened = lambda x: bf16(x).astype(jnp.float32)
wide = {"preferred_element_type": jnp.float32}
PINNED = {  # functions of two values of products; the dtype of the operands of `mul` in bf16 and fp16
  "nothing": (lambda a, b: (a * b) @ W, "bf16", "f16"),
  "cast through bfloat16": (lambda a, b: widened(a) * b, "f32", "f32"),
  "explicit bfloat16": (lambda a, b: bf16(a) * bf16(b), "bf16", "bf16"),
  "explicit float16": (lambda a, b: f16(a) * f16(b), "f16", "f16"),
  "complex": (lambda a, b: (a + 1j) * b, "complex64", "complex64"),
  "integers": (lambda a, b: a.astype(int) * b.astype(int), "int32", "int32"),
}
DOTS = {  # products that the user decided on; the dtypes of operands and result under fp16
  "explicit bfloat16": (lambda x: bf16(x) @ bf16(W), "bf16 bf16 > bf16"),
  "preferred_element_type": (lambda x: jnp.matmul(bf16(x), bf16(W), **wide), "bf16 bf16 > f32"),
  "precision": (lambda x: jnp.matmul(x, W, precision="highest"), "f32 f32 > f32"),
  "integers": (lambda x: x.astype(int) @ W.astype(int), "int32 int32 > int32"),
  "complex": (lambda x: (x + 1j) @ (W + 1j).astype(np.complex64), "complex64 complex64 > complex64"),
  "pinned operand": (lambda x: widened(x) @ W, "f16 f16 > f16"),
}


def test_dtypes_of_the_users_own_are_kept():
  for name, (f, *want) in PINNED.items():
    for policy, dtype in zip(HALF, want, strict=True):
      cast = mpjax.autocast(lambda x, f=f: f(x @ W, x @ W), policy)
      assert {dtypes(e.invars) for e in named("mul", cast, X)} == {f"{dtype} {dtype}"}, (name, policy)
  for name, (f, want) in DOTS.items():
    (dot,) = named("dot_general", FP16(f), X)
    assert f"{multiplied(dot)} > {dtypes(dot.outvars)}" == want, name
