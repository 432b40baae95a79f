"""The contract of `mpjax.autocast`: forms, static arguments, dtypes in and out."""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import lowered_products, products, run_together

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
BF16 = mpjax.autocast(policy="bf16")


def layer(w, x):
  """A product, an island and a residual: x's shape in, x's shape out."""
  return x + jax.nn.softmax(jnp.tanh(x @ w)) * 0.5


FORMS = [
  lambda f: mpjax.autocast(f, policy="bf16"),
  lambda f: mpjax.autocast(policy="bf16")(f),
  mpjax.autocast,  # auto, which is bf16 on the CPU
  lambda f: mpjax.autocast(f, "params=float32,compute=bfloat16,output=float32"),
  lambda f: mpjax.autocast(f, {"base": "bf16"}),
  lambda f: mpjax.autocast(f, mpjax.get_policy("bf16")),
  lambda f: mpjax.autocast(f, jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)),
  lambda f: functools.partial(mpjax.autocast(f, "bf16")),
  lambda f: mpjax.autocast(functools.partial(f), "bf16"),
  lambda f: lambda w, x: mpjax.autocast(f, "bf16")(w, x=x),
]


def test_forms():
  casts = {f"form {i}": form(layer) for i, form in enumerate(FORMS)}
  results, found = run_together({"plain": layer, **casts}, W, X)
  for name in casts:
    assert found[name] == {"bf16 bf16"}, name
    assert [*leaf_failures("output", results[name], results["plain"], TOLERANCE["bf16"])] == [], name


def test_signature_name_and_docstring_are_those_of_the_function_and_methods_can_be_decorated():
  def model(params, x: int, *rest, flag: bool = False, **options):
    """Says what it does."""

  cast = mpjax.autocast(model, "bf16")
  assert (cast.__name__, cast.__doc__) == ("model", "Says what it does.")
  assert inspect.signature(cast) == inspect.signature(model)

  class Model:
    scale = 2.0

    @mpjax.autocast(policy="bf16")
    def method(self, x):
      return x @ W * self.scale

    @staticmethod
    @mpjax.autocast(policy="fp16")
    def static(x):
      return x @ W

    @classmethod
    @mpjax.autocast(policy="fp16")
    def of_class(cls, x):
      return x @ W * cls.scale

  assert products(Model().method, X) == products(jax.jit(Model().method), X) == {"bf16"}
  assert products(Model.static, X) == products(Model.of_class, X) == {"f16"}
  assert [*leaf_failures("output", Model().method(X), X @ W * 2, TOLERANCE["bf16"])] == []


def test_static_arguments_are_seen_by_the_function_as_they_are():
  seen = []

  def f(x, flag, name, n, scale, nothing, *, shape):
    seen.append((flag, name, n, scale, nothing, shape))
    return jnp.broadcast_to((x @ W * scale).sum(), shape) if flag else x

  args = (True, "relu", 3, 0.5, None)
  jax.eval_shape(lambda x: BF16(f)(x, *args, shape=(2, 3)), X)
  jax.jit(BF16(f), static_argnums=(1, 2, 3, 4), static_argnames="shape").trace(X, *args, shape=(2, 3))
  assert seen == [(*args, (2, 3))] * 2
  assert [type(x) for x in seen[0]] == [bool, str, int, float, type(None), tuple]


class Pair(NamedTuple):
  first: Any
  second: Any


HALVES = ("float32", "bfloat16", "float16")


def outputs(x):
  y = x @ W
  floats = [
    y,
    x[:2],
    y.astype(jnp.bfloat16),
    y.astype(jnp.float16),
    jnp.float32(3),
    Pair((y,), [np.float32(1)]),
  ]
  kept = [y.astype(jnp.float8_e4m3fn), y + 1j, jnp.argmax(y), y.astype(jnp.uint8), y > 0, jnp.array(False)]
  return {"floats": floats, "kept": [*kept, jax.random.key(0)], "numbers": (None, 3, 2.5)}


def test_floating_outputs_have_the_output_dtype_and_others_their_own():
  types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
  want = jax.eval_shape(outputs, X)
  for compute, output in itertools.product(HALVES, HALVES):
    cast = mpjax.autocast(outputs, f"params=float32,compute={compute},output={output}")
    got = jax.eval_shape(cast, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert types(got["kept"]) == types(want["kept"]), (compute, output)
    assert types(got["floats"]) == [(shape, np.dtype(output)) for shape, _ in types(want["floats"])], compute


def test_float64_is_never_narrowed():
  with jax.enable_x64(True):
    wide, narrow = np.ones((4, 4)), np.ones((4, 4), np.float32)

    def f(a, b):
      return a @ a, b @ b, (b @ b).astype(np.float64) + 1e-300, jnp.exp(a), jnp.zeros(3, jnp.int64)

    got = jax.eval_shape(BF16(f), wide, narrow)
    assert [str(x.dtype) for x in got] == ["float64", "float32", "float64", "float64", "int64"]
    assert lowered_products(BF16(f), wide, narrow) == {"f64 f64": 1, "bf16 bf16": 2}
    loss = lambda a, b: BF16(f)(a, b)[0].sum() + BF16(f)(a, b)[2].sum()
    grads = jax.eval_shape(jax.grad(loss, (0, 1)), wide, narrow)
    assert [str(g.dtype) for g in grads] == ["float64", "float32"]
    fine = 1 + 2.0**-40
    f = BF16(lambda x: (jnp.float64(fine) + 0 * (x @ x).astype(np.float64).sum()) - 1)
    assert float(jax.jit(f)(narrow)) == fine - 1


def test_gradients_have_the_dtype_of_their_argument():
  for policy, dtype in itertools.product(["bf16", "fp16"], HALVES):
    args = (W.astype(jnp.dtype(dtype)), X, np.ones(4, jnp.dtype(dtype)))
    loss = mpjax.autocast(lambda w, x, b: jnp.sum(layer(w, x) + b), policy)
    for got, arg in zip(jax.eval_shape(jax.grad(loss, (0, 1, 2)), *args), args, strict=True):
      assert (got.dtype, got.shape) == (arg.dtype, arg.shape), (policy, dtype)


@jax.named_scope("net")
def scoped(x):
  return jax.named_scope("head")(jnp.matmul)(jax.named_scope("body")(jnp.matmul)(x, W), W)


cast = lambda policy, **options: lambda: mpjax.autocast(layer, policy, **options)
overridden = lambda policy, *patterns: (
  lambda: mpjax.autocast(scoped, policy, overrides=dict.fromkeys(patterns, "fp32"))(X)
)
integers = jmp.Policy(jnp.float32, jnp.int32, jnp.float32)
ERRORS = [  # (call, its error)
  (cast("bf61"), ValueError, "bf61.*did you mean 'bf16'"),
  (cast({"compute": "int8"}), ValueError, "int8.*expected one of"),
  (cast(integers), ValueError, "compute_dtype=.*int32.*floating dtype"),
  (cast(16), ValueError, "policy 16 of type int"),
  (lambda: mpjax.autocast("bf16"), ValueError, "'bf16'.*expected a function.*policy='bf16'"),
  (cast("bf16", ops={"exp"}), ValueError, "ops=.*OpLists"),
  (cast("bf16", recompute="x"), ValueError, "recompute='x'.*islands or nothing"),
  (cast("bf16", overrides={"head": "fp61"}), ValueError, "fp61.*did you mean"),
  (cast("bf16", overrides="head"), ValueError, "overrides='head'.*mapping"),
  (overridden("bf16", "h("), ValueError, r"'h\('.*not a regular expression"),
  (overridden("bf16", 3), ValueError, "override 3"),
  (lambda: mpjax.autocast(layer, "bf16", overrides={"head": "fp32"})(W, X), ValueError,
   "'head' matches no module path.*named_scope"),
  (overridden("bf16", "hed"), ValueError, "'hed' matches no module path.*net/body, net/head"),
  (overridden("bf16", "head", "hea"), ValueError, "'hea' matches no module path"),
  (overridden({"base": "bf16", "overrides": {"hed": "fp32"}}), ValueError, "'hed' matches no module path"),
  (overridden("fp32", "hed"), ValueError, "'hed' matches no module path"),
  (lambda: BF16(lambda x: {"loss": x.sum(), "model": object()})(X), TypeError,
   r"object.*output\['model'\].*arrays or numbers"),
  (lambda: BF16(lambda x: ("done", x))(X), TypeError, r"'done'.*str.*output\[0\]"),
  (lambda: jax.jit(BF16(lambda x: ("done", x)))(X), TypeError, "'done'"),
  # The function's own come through as they are.
  (lambda: BF16(lambda x: x @ x)(X), TypeError, "dot_general"),
  (lambda: BF16(layer)(W), TypeError, "missing"),
  (lambda: BF16(lambda x: {}["inside"])(X), KeyError, "inside"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors_say_what_is_wrong_and_the_way_out(call, kind, message):
  with pytest.raises(kind, match=f"(?s){message}"):
    call()
