"""The contract of `mpjax.autocast`: forms, dtypes in and out, composition with JAX's transformations, errors."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import lowered_products, products

W = normal(4, 4, scale=0.5)
X = jnp.asarray(normal(8, 4, seed=1))
BF16 = mpjax.autocast(policy="bf16")


def layer(w, x):
  """A product, an island and a residual: x's shape in, x's shape out."""
  return x + jax.nn.softmax(jnp.tanh(x @ w)) * 0.5


def close(got: Any, want: Any) -> None:
  assert [*leaf_failures("output", got, want, TOLERANCE["bf16"])] == []


def same(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Forms

FORMS = {
  "second argument": lambda f: mpjax.autocast(f, "bf16"),
  "keyword": lambda f: mpjax.autocast(f, policy="bf16"),
  "decorator": lambda f: mpjax.autocast(policy="bf16")(f),
  "default": mpjax.autocast,  # auto, which is bf16 on the CPU
  "string": lambda f: mpjax.autocast(f, "params=float32,compute=bfloat16,output=float32"),
  "mapping": lambda f: mpjax.autocast(f, {"base": "bf16"}),
  "Policy": lambda f: mpjax.autocast(f, mpjax.get_policy("bf16")),
  "jmp.Policy": lambda f: mpjax.autocast(f, jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)),
  "partial of it": lambda f: functools.partial(mpjax.autocast(f, "bf16")),
  "of a partial": lambda f: mpjax.autocast(functools.partial(f), "bf16"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
  cast = FORMS[form](layer)
  assert products(cast, W, X) == {"bf16"}
  close(cast(W, X), layer(W, X))
  close(cast(W, x=X), layer(W, X))


def test_signature_name_and_docstring_are_those_of_the_function():
  def model(params, x: int, *rest, flag: bool = False, **options):
    """Says what it does."""
    return x

  cast = mpjax.autocast(model, "bf16")
  assert (cast.__name__, cast.__doc__) == ("model", "Says what it does.")
  assert inspect.signature(cast) == inspect.signature(model)


def test_decorator_of_methods():
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

  model = Model()
  assert products(model.method, X) == {"bf16"}
  assert products(jax.jit(model.method), X) == {"bf16"}
  assert products(Model.static, X) == products(model.of_class, X) == {"f16"}
  close(model.method(X), X @ W * 2)


def test_static_arguments_are_seen_by_the_function_as_they_are():
  seen = []

  def f(x, flag, name, n, scale, nothing, *, shape):
    seen.append((flag, name, n, scale, nothing, shape))
    return jnp.broadcast_to((x @ W * scale).sum(), shape) if flag else x

  args = (True, "relu", 3, 0.5, None)
  BF16(f)(X, *args, shape=(2, 3))
  jax.jit(BF16(f), static_argnums=(1, 2, 3, 4), static_argnames="shape")(X, *args, shape=(2, 3))
  assert seen == [(*args, (2, 3))] * 2
  assert [type(x) for x in seen[0]] == [bool, str, int, float, type(None), tuple]


def test_arguments_are_never_changed():
  params = {"w": W.copy(), "b": jnp.ones(4), "n": np.arange(4)}

  def f(params, x):
    assert [leaf.dtype for leaf in jax.tree.leaves(params)] == [np.float32, np.int32, np.float32]
    assert x.dtype == np.float32
    return x @ params["w"] + params["b"] * params["n"]

  before = jax.tree.map(np.array, params)
  BF16(f)(params, X)
  same(params, before)


# Outputs


class Pair(NamedTuple):
  first: Any
  second: Any


def outputs(x):
  y = x @ W
  return {
    "product": y,
    "argument": x[:2],
    "bfloat16": y.astype(jnp.bfloat16),
    "float16": y.astype(jnp.float16),
    "float8": y.astype(jnp.float8_e4m3fn),
    "complex": y + 1j,
    "int": jnp.argmax(y),
    "uint8": y.astype(jnp.uint8),
    "bool": y > 0,
    "key": jax.random.key(0),
    "constant": jnp.float32(3),
    "constant bool": jnp.array(False),
    "none": None,
    "number": 3,
    "weak": 2.5,
    "tree": Pair((y,), [np.float32(1)]),
  }


KEPT = {"float8", "complex", "int", "uint8", "bool", "key", "constant bool"}


@pytest.mark.parametrize("output", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("jitted", [False, True])
def test_floating_outputs_have_the_output_dtype_and_others_their_own(compute, output, jitted):
  cast = mpjax.autocast(outputs, f"params=float32,compute={compute},output={output}")
  got, want = (jax.jit(cast) if jitted else cast)(X), (jax.jit(outputs) if jitted else outputs)(X)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for name in sorted(set(want) - {"none", "number", "weak", "tree"}):
    assert isinstance(got[name], jax.Array), name
    assert got[name].dtype == (want[name].dtype if name in KEPT else np.dtype(output)), name
    assert got[name].shape == want[name].shape, name
  assert got["tree"].first[0].dtype == got["tree"].second[0].dtype == np.dtype(output)
  if not jitted:
    assert (got["number"], got["weak"], got["none"]) == (3, 2.5, None)
    assert (type(got["number"]), type(got["weak"])) == (int, float)


def test_float64_is_never_narrowed():
  with jax.enable_x64(True):
    wide, narrow = np.ones((4, 4)), np.ones((4, 4), np.float32)

    def f(a, b):
      return a @ a, b @ b, (b @ b).astype(np.float64) + 1e-300, jnp.exp(a), jnp.zeros(3, jnp.int64)

    got = jax.jit(BF16(f))(wide, narrow)
    assert [str(x.dtype) for x in got] == ["float64", "float32", "float64", "float64", "int64"]
    assert lowered_products(BF16(f), wide, narrow) == {"f64 f64": 1, "bf16 bf16": 2}
    grads = jax.grad(lambda a, b: BF16(f)(a, b)[0].sum() + BF16(f)(a, b)[2].sum(), (0, 1))(wide, narrow)
    assert [str(g.dtype) for g in grads] == ["float64", "float32"]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_have_the_dtype_of_their_argument(policy, dtype):
  args = (W.astype(dtype), X, jnp.ones(4, dtype))
  loss = mpjax.autocast(lambda w, x, b: jnp.sum(layer(w, x) + b), policy)
  for got, arg in zip(jax.grad(loss, (0, 1, 2))(*args), args, strict=True):
    assert (got.dtype, got.shape) == (arg.dtype, arg.shape)


# Errors


def fails_outside(*args):
  return {"loss": jnp.float32(0), "model": object()}


ERRORS = {
  "unknown policy": (lambda: mpjax.autocast(layer, "bf61"), ValueError, "bf61.*did you mean 'bf16'"),
  "integer dtype": (lambda: mpjax.autocast(layer, {"compute": "int8"}), ValueError, "int8.*expected one of"),
  "integer jmp.Policy": (
    lambda: mpjax.autocast(layer, jmp.Policy(jnp.float32, jnp.int32, jnp.float32)),
    ValueError,
    "compute_dtype=.*int32.*floating dtype",
  ),
  "policy is a number": (lambda: mpjax.autocast(layer, 16), ValueError, "policy 16 of type int"),
  "policy first": (lambda: mpjax.autocast("bf16"), ValueError, "'bf16'.*expected a function.*policy='bf16'"),
  "ops is a set": (lambda: mpjax.autocast(layer, "bf16", ops={"exp"}), ValueError, "ops=.*OpLists"),
  "recompute": (
    lambda: mpjax.autocast(layer, "bf16", recompute="x"),
    ValueError,
    "recompute='x'.*islands.*dots.*nothing",
  ),
  "non-array output": (
    lambda: BF16(fails_outside)(X),
    TypeError,
    r"object.*output\['model'\].*arrays or numbers",
  ),
  "string output": (lambda: BF16(lambda x: ("done", x))(X), TypeError, r"'done'.*str.*output\[0\]"),
  "string output in jit": (lambda: jax.jit(BF16(lambda x: ("done", x)))(X), TypeError, "'done'"),
  "regex": (
    lambda: mpjax.autocast(layer, "bf16", overrides={"h(": "fp32"})(W, X),
    ValueError,
    r"'h\('.*not a regular expression",
  ),
  "regex is a number": (
    lambda: mpjax.autocast(layer, "bf16", overrides={3: "fp32"})(W, X),
    ValueError,
    "override 3",
  ),
  "policy of an override": (
    lambda: mpjax.autocast(layer, "bf16", overrides={"head": "fp61"})(W, X),
    ValueError,
    "fp61.*did you mean",
  ),
  "overrides are a string": (
    lambda: mpjax.autocast(layer, "bf16", overrides="head")(W, X),
    ValueError,
    "overrides='head'.*mapping",
  ),
  "nothing has a path": (
    lambda: mpjax.autocast(layer, "bf16", overrides={"head": "fp32"})(W, X),
    ValueError,
    "'head' matches no module path.*named_scope",
  ),
  "no such path": (
    lambda: mpjax.autocast(scoped, "bf16", overrides={"hed": "fp32"})(X),
    ValueError,
    "'hed' matches no module path.*net/body, net/head",
  ),
  "no such path, of two": (
    lambda: mpjax.autocast(scoped, "bf16", overrides={"head": "fp32", "hea": "fp32"})(X),
    ValueError,
    "'hea' matches no module path",
  ),
  "no such path, in the policy": (
    lambda: mpjax.autocast(scoped, {"base": "bf16", "overrides": {"hed": "fp32"}})(X),
    ValueError,
    "'hed' matches no module path",
  ),
  "no such path, base fp32": (
    lambda: mpjax.autocast(scoped, "fp32", overrides={"hed": "fp32"})(X),
    ValueError,
    "'hed' matches no module path",
  ),
}


def scoped(x):
  with jax.named_scope("net"):
    with jax.named_scope("body"):
      x = x @ W
    with jax.named_scope("head"):
      return x @ W


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong_and_the_way_out(name):
  call, kind, message = ERRORS[name]
  with pytest.raises(kind, match=f"(?s){message}"):
    call()


def test_errors_of_the_function_come_through_as_they_are():
  class Mine(Exception):
    pass

  def f(x):
    raise Mine("inside")

  with pytest.raises(Mine, match="inside"):
    BF16(f)(X)
  with pytest.raises(TypeError, match="dot_general"):
    BF16(lambda x: x @ x)(X)
  with pytest.raises(TypeError, match="missing"):
    BF16(layer)(W)
