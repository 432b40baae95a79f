"""What users decide under autocast: regions, lists, accumulation, recomputation, dtypes of their own, literals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import dtypes, equations, jit, lowered_products, multiplied, named, products

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
HALF = {"bf16": "bf16", "fp16": "f16"}
BF16 = mpjax.autocast(policy="bf16")
FP16 = mpjax.autocast(policy="fp16")


def close(got, want, policy="bf16"):
  assert [*leaf_failures("output", got, want, TOLERANCE[policy])] == []


# full_precision


@pytest.mark.parametrize("policy", HALF)
def test_full_precision_leaves_a_region_in_float32_backward_too(policy):
  region = mpjax.full_precision(lambda w, x: jnp.tanh(x @ w) @ w)
  loss = lambda w, x: jnp.sum(region(w, x @ w) @ w)
  half = HALF[policy]
  cast = mpjax.autocast(loss, policy)
  assert lowered_products(cast, W, X) == {f"{half} {half}": 2, "f32 f32": 2}
  # The two of the region have two gradients each, the last has two, and the first has one for w.
  assert lowered_products(jax.grad(cast), W, X) == {f"{half} {half}": 4, "f32 f32": 6}
  close(jit(jax.grad(cast))(W, X), jax.grad(loss)(W, X))


def test_full_precision_is_exact():
  region = mpjax.full_precision(lambda x: jax.nn.softmax(x @ W, axis=-1) @ W)
  got = jit(BF16(region))(X)
  np.testing.assert_allclose(got, jit(region)(X), rtol=1e-6)


def test_full_precision_without_autocast_does_nothing():
  f = lambda x: jnp.exp(x @ W)
  assert str(jax.make_jaxpr(mpjax.full_precision(f))(X)) == str(jax.make_jaxpr(f)(X))


def test_full_precision_is_a_decorator_of_methods_and_keeps_the_signature():
  class Model:
    @mpjax.full_precision
    def head(self, x, *, scale: float):
      """Logits."""
      return x @ W * scale

  assert Model.head.__doc__ == "Logits."
  assert products(BF16(lambda x: Model().head(x @ W, scale=2.0)), X) == {"bf16", "f32"}


REGIONS = {
  "jit inside": lambda f: mpjax.full_precision(jax.jit(f)),
  "jit outside": lambda f: jax.jit(mpjax.full_precision(f)),
  "scan inside": lambda f: mpjax.full_precision(
    lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0]
  ),
  "scan outside": lambda f: lambda x: jax.lax.scan(lambda c, _: (mpjax.full_precision(f)(c), None), x, None, 2)[0],
  "cond": lambda f: mpjax.full_precision(lambda x: jax.lax.cond(x.sum() > 0, f, jnp.sin, x)),
  "checkpoint": lambda f: mpjax.full_precision(jax.checkpoint(f)),
  "vmap": lambda f: jax.vmap(mpjax.full_precision(f)),
  "grad": lambda f: mpjax.full_precision(jax.grad(lambda x: f(x).sum())),
  "in another": lambda f: mpjax.full_precision(mpjax.full_precision(f)),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
def test_full_precision_composes(name):
  region = REGIONS[name](lambda x: jnp.tanh(x @ W))
  vmapped = jax.jit(jax.vmap(BF16(lambda x: region(x[None])[0])))
  for fun in (BF16(region), jax.grad(lambda x: BF16(region)(x).sum()), vmapped):
    assert set(lowered_products(fun, X)) == {"f32 f32"}


# Lists

DEFAULT = mpjax.OpLists.default()


def test_default_lists():
  assert {"dot_general", "conv_general_dilated", "ragged_dot_general"} <= DEFAULT.allow
  assert {"exp", "log", "pow", "cumsum", "reduce_sum", "erf_inv", "lu", "fft"} <= DEFAULT.deny
  assert {"add", "mul", "max", "reshape", "select_n"} <= DEFAULT.infer
  assert {"pallas_call", "pure_callback", "ffi_call", "random_bits"} <= DEFAULT.opaque
  assert mpjax.OpLists.default() == DEFAULT
  assert hash(mpjax.OpLists.default()) == hash(DEFAULT)


def test_replace_moves_a_name_and_leaves_the_others():
  ops = DEFAULT.replace(deny=DEFAULT.deny | {"tanh", "my_primitive"})
  assert ops.deny == DEFAULT.deny | {"tanh", "my_primitive"}
  assert "tanh" not in ops.infer | ops.deny_float16
  assert ops.allow == DEFAULT.allow
  moved = DEFAULT.replace(allow=DEFAULT.allow | {"add"}, deny=DEFAULT.deny - {"exp"})
  assert "add" in moved.allow - moved.infer
  assert "exp" in moved.infer
  assert mpjax.OpLists.default() == DEFAULT


LIST_ERRORS = {
  "unknown list": (lambda: DEFAULT.replace(denied={"exp"}), "'denied'.*did you mean 'deny'"),
  "on two lists": (lambda: DEFAULT.replace(allow={"exp"}, deny={"exp"}), "'exp' is on two lists"),
  "a string": (lambda: DEFAULT.replace(deny="exp"), r"deny='exp'.*set of names.*\{'exp'\}"),
  "a function": (lambda: DEFAULT.replace(deny={jnp.exp}), "deny=.*names of primitives"),
}


@pytest.mark.parametrize("name", LIST_ERRORS)
def test_errors_of_lists(name):
  call, message = LIST_ERRORS[name]
  with pytest.raises(ValueError, match=message):
    call()


LISTED = {  # (changed lists, what runs, the dtypes of that primitive's operands under bf16)
  "default": (DEFAULT, "mul", "bf16 bf16"),
  "deny a follower": (DEFAULT.replace(deny=DEFAULT.deny | {"mul"}), "mul", "f32 f32"),
  "exp by default": (DEFAULT, "exp", "f32"),
  "exp follows": (DEFAULT.replace(infer=DEFAULT.infer | {"exp"}), "exp", "bf16"),
  "exp in half": (DEFAULT.replace(allow=DEFAULT.allow | {"exp"}), "exp", "bf16"),
  "no products": (DEFAULT.replace(deny=DEFAULT.deny | {"dot_general"}), "dot_general", "f32 f32"),
  "opaque": (DEFAULT.replace(opaque=DEFAULT.opaque | {"mul"}), "mul", "f32 f32"),
}


@pytest.mark.parametrize("name", LISTED)
def test_changed_lists_have_an_effect(name):
  ops, primitive, want = LISTED[name]
  cast = mpjax.autocast(lambda x: jnp.exp(((x @ W) * (x @ W)) @ W) @ W, "bf16", ops=ops)
  for fun in (cast, jax.jit(cast)):
    assert {dtypes(e.invars) for e in named(primitive, fun, X)} == {want}
  close(jit(cast)(0.1 * X), np.exp((0.1 * X @ W) ** 2 @ W) @ W)


# Accumulation and recomputation


@pytest.mark.parametrize("policy", HALF)
def test_accum_dtype_is_the_dtype_of_products(policy):
  spec = {"base": policy, "accum_dtype": "float32"}
  cast = mpjax.autocast(lambda x: (x @ W) @ W, spec)
  for equation in named("dot_general", cast, X):
    assert multiplied(equation) == f"{HALF[policy]} {HALF[policy]}"
    assert dtypes(equation.outvars) == "f32"
    assert equation.params["preferred_element_type"] == np.float32
  grad = jax.grad(lambda x: cast(x).sum())
  assert set(lowered_products(cast, X)) == {f"{HALF[policy]} {HALF[policy]}"}
  close(grad(X), jax.grad(lambda x: ((x @ W) @ W).sum())(X))


def test_matmul_precision_of_a_policy():
  cast = mpjax.autocast(lambda x: x @ W, {"base": "fp32", "matmul_precision": "highest"})
  assert "precision = [HIGHEST, HIGHEST]" in jax.jit(cast).lower(X).as_text()


@pytest.mark.parametrize("recompute", ["islands", "dots", "nothing"])
def test_recomputation_changes_no_value(recompute):
  loss = lambda w, x: jnp.sum(jax.nn.softmax(jax.nn.gelu(x @ w) @ w) ** 2)
  cast = mpjax.autocast(loss, "bf16", recompute=recompute)
  reference = mpjax.autocast(loss, "bf16")
  assert products(cast, W, X) == {"bf16"}
  for got, want in zip(*(jit(jax.value_and_grad(f))(W, X) for f in (cast, reference)), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-4)


def residuals(fun, *args):
  """Bytes that the backward pass is given by the forward pass."""
  return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(fun, *args)[1]) if hasattr(x, "nbytes"))


def test_recomputation_saves_less():
  deep = lambda x: jnp.sum(jax.nn.gelu(jax.nn.softmax(jax.nn.gelu(x @ W) @ W) @ W) @ W)
  x = normal(256, 4)
  cast = {r: mpjax.autocast(deep, "bf16", recompute=r) for r in ("dots", "islands", "nothing")}
  saved = [residuals(fun, x) for fun in (*cast.values(), deep)]
  assert saved == sorted(saved)
  assert saved[0] < saved[2] < saved[3]


# Dtypes of the user's own

PINNED = {  # functions of two values of products; the dtypes of the operands of `mul`, bf16 and fp16
  "nothing": (lambda a, b: (a * b) @ W, "bf16 bf16", "f16 f16"),
  "cast through bfloat16": (lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32) * b, "f32 f32", "f32 f32"),
  "explicit bfloat16": (lambda a, b: a.astype(jnp.bfloat16) * b.astype(jnp.bfloat16), "bf16 bf16", "bf16 bf16"),
  "explicit float16": (lambda a, b: a.astype(jnp.float16) * b.astype(jnp.float16), "f16 f16", "f16 f16"),
  "complex": (lambda a, b: (a + 1j) * b, "complex64 complex64", "complex64 complex64"),
  "integers": (lambda a, b: a.astype(int) * b.astype(int), "int32 int32", "int32 int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", PINNED)
def test_dtypes_of_the_users_own_are_kept(name):
  f, *want = PINNED[name]
  for policy, wanted in zip(HALF, want, strict=True):
    cast = mpjax.autocast(lambda x: f(x @ W, x @ W), policy)
    assert {dtypes(e.invars) for e in named("mul", cast, X)} == {wanted}


DOTS = {  # products that the user decided on; the dtypes of operands and result under fp16
  "explicit bfloat16": (lambda x: x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16), "bf16 bf16 > bf16"),
  "preferred_element_type": (
    lambda x: jnp.matmul(x.astype(jnp.bfloat16), W.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
    "bf16 bf16 > f32",
  ),
  "precision": (lambda x: jnp.matmul(x, W, precision="highest"), "f32 f32 > f32"),
  "integers": (lambda x: x.astype(int) @ W.astype(int), "int32 int32 > int32"),
  "complex": (lambda x: (x + 1j) @ (W + 1j), "complex64 complex64 > complex64"),
  "pinned operand": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) @ W, "f16 f16 > f16"),
}


@pytest.mark.parametrize("name", DOTS)
def test_products_that_the_user_decided_on(name):
  f, want = DOTS[name]
  (dot,) = named("dot_general", FP16(f), X)
  assert f"{multiplied(dot)} > {dtypes(dot.outvars)}" == want


def test_a_float64_value_is_not_narrowed_on_its_way():
  with jax.enable_x64(True):
    fine = 1 + 2.0**-40
    f = lambda x: (jnp.float64(fine) + 0 * (x @ W).astype(np.float64).sum()) - 1
    assert float(BF16(f)(X)) == fine - 1
    wide = [e for e in equations(BF16(f), X) if "f64" in dtypes(e.invars)]
    assert wide
    assert not any(set(dtypes(e.outvars).split()) & {"f32", "bf16"} for e in wide)


# Literals out of float16's range

LITERALS = {
  "epsilon": lambda x: x / (jnp.abs(x - x) + 1e-8),
  "epsilon under a root": lambda x: x * jax.lax.rsqrt((x - x) ** 2 + 1e-12),
  "reciprocal of an epsilon": lambda x: (x - x) * (1 / (x - x + 1e-6)),
  "large exponential": lambda x: (x * 0 + 1) * jnp.exp(x * 0 + 12.0) * 1e-6,
  "epsilon in a log": lambda x: jnp.log(jax.nn.relu(-jnp.abs(x)) + 1e-9),
  "large": lambda x: x * 1e6,
  "65505": lambda x: x * 0 + 65505.0,
  "large minus large": lambda x: (x + 1e9) - 1e9,
  "mask": lambda x: jax.nn.softmax(x + jnp.where(np.arange(4) < 2, 0.0, -1e9)),
  "mask of -inf": lambda x: jax.nn.softmax(jnp.where(np.arange(4) < 2, x, -jnp.inf)),
  "lowest": lambda x: jnp.max(jnp.where(np.arange(4) < 2, x, jnp.finfo(np.float32).min), -1),
  "array": lambda x: x * np.array([1e-9, 1.0, 1e5, 1e9], np.float32),
  "argument": lambda x: x * jnp.full((4,), 1e5),
}
# Whose gradients float16 has not.
STEEP = {
  "epsilon",
  "epsilon under a root",
  "reciprocal of an epsilon",
  "epsilon in a log",
  "large",
  "array",
  "argument",
}


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("name", LITERALS)
def test_literals_out_of_range(name, policy):
  f = lambda x: LITERALS[name](x @ W)
  got, want = jit(mpjax.autocast(f, policy))(X), f(X)
  if name != "large minus large":  # which float32 rounds to multiples of 64
    close(got, want, policy)
  assert np.isfinite(got).all()
  if policy == "bf16" or name not in STEEP:
    assert np.isfinite(jit(jax.grad(lambda x: mpjax.autocast(f, policy)(x).mean()))(X)).all()
