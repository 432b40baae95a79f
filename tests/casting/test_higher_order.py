"""Higher-order primitives under `mpjax.autocast`: what each one promises is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import bodies, dtypes, equations, jit, named

W = jnp.asarray(normal(4, 4, scale=0.5))
X = jnp.asarray(normal(8, 4, seed=1))
BF16 = mpjax.autocast(policy="bf16")
product = lambda x: x @ W


MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))


def types(equation: Any) -> str:
  return f"{dtypes(equation.invars)} > {dtypes(equation.outvars)}"


def assert_near(functions: dict[str, Callable[..., Any]], policy: str, gradient: bool = False) -> None:
  """Runs all of the functions, with autocast and without, in one program."""

  def values(fun: Callable[..., Any], x: Any) -> Any:
    total = lambda x: sum(y.sum() for y in jax.tree.leaves(fun(x)))
    return {"output": fun(x)} | ({"gradient": jax.grad(total)(x)} if gradient else {})

  both = lambda fun, x: (values(mpjax.autocast(fun, policy), x), values(fun, x))
  found = jit(lambda x: {name: both(fun, x) for name, fun in functions.items()})(X)
  for name, (got, want) in found.items():
    for kind, slack in (("output", 2), ("gradient", 4))[: 1 + gradient]:
      assert [*leaf_failures(kind, got[kind], want[kind], slack * TOLERANCE[policy])] == [], name


# What an equation says of itself is kept


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True, inline=False)
def donating(x, unused):
  return x @ W


DOTS = jax.checkpoint_policies.dots_saveable


KEPT = {  # a function, an equation of its jaxpr, and parameters that it has before and after autocast
  "jit donation": (lambda x: donating(x, x[0]), "jit",
    ("name", "donated_invars", "keep_unused", "inline")),
  "jit shardings": (jax.jit(product, in_shardings=ROWS, out_shardings=ROWS), "jit",
    ("in_shardings", "out_shardings", "ctx_mesh")),
  "scan": (lambda x: jax.lax.scan(lambda c, y: (c @ W, y @ W), x, jnp.stack([x] * 4), reverse=True,
    unroll=2), "scan", ("length", "reverse", "unroll")),
  "while": (lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ W), (0, x)),
    "while", ("cond_nconsts", "body_nconsts")),
  "remat": (jax.checkpoint(product, prevent_cse=False, policy=DOTS), "checkpoint remat2",
    ("prevent_cse", "differentiated")),
  "shard_map": (lambda x: jax.shard_map(product, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x),
    "shard_map", ("mesh", "in_specs", "out_specs", "check_vma")),
  "sharding constraint": (lambda x: jax.lax.with_sharding_constraint(x @ W, ROWS), "sharding_constraint",
    ("sharding",)),
  "checkpoint_name": (lambda x: checkpoint_name(x @ W, "hidden"), "name", ("name",)),
  "optimization_barrier": (lambda x: jax.lax.optimization_barrier(x @ W), "optimization_barrier", ()),
}  # fmt: skip


def test_parameters_are_kept():
  for name, (fun, primitive, parameters) in KEPT.items():
    (before,) = (e for e in named(primitive, fun, X) if e.params.get("name") != "_where")
    (after,) = named(primitive, BF16(fun), X)
    for parameter in parameters:
      assert after.params[parameter] == before.params[parameter], (name, parameter)
    assert len(after.outvars) == len(before.outvars), name
    if bodies(before):
      assert "bf16" in " ".join(map(types, named("dot_general", BF16(fun), X))), name
  assert_near({name: fun for name, (fun, *_) in KEPT.items()}, "bf16")


# Dtypes of carries and branches


def attend(x):
  return jax.nn.softmax(x @ W) @ W


SCANS = {
  # (step, dtypes of the carry, of what is stacked); H is the half dtype
  "residual stream": (lambda c, x: (c + (c @ x.T) @ x, None), "H", ""),
  # each layer has weights of its own
  "sampler": (lambda c, x: (c + attend(c), None), "f32", ""),
  # the same network at every step
  "layers": (lambda c, x: (jnp.tanh(c @ W), None), "H", ""),
  "sum": (lambda c, x: (c + (x @ W).sum(), None), "f32", ""),
  "sum of squares": (lambda c, x: (c + (x @ W) ** 2, None), "f32", ""),
  "decaying mean": (lambda c, x: (0.9 * c + 0.1 * (x @ W), None), "f32", ""),
  "log-probabilities": (lambda c, x: (jnp.log(jnp.exp(c - c.max()) @ jnp.abs(W)) + c.max() + x, None), "f32", ""),
  "stacked products": (lambda c, x: (c @ W, x @ W), "H", "H"),
  "counter": (lambda c, x: ((c[0] + 1, c[1] @ W), None), "int32 H", ""),
  "stream and loss": (lambda c, x: ((c[0] + (c[0] @ x.T) @ x, c[1] + jnp.sum(c[0])), None), "H f32", ""),
  "swapped": (lambda c, x: ((c[1] @ W, c[0] @ W), None), "H H", ""),
}  # fmt: skip


def test_carries_have_one_dtype_that_suits_them():
  functions = {}
  for name, (step, carry, stacked) in SCANS.items():
    first = {"int32 H": (0, X), "H f32": (X, 0.0), "H H": (X, X)}.get(carry, X)
    fun = functions[name] = lambda x, step=step, first=first: jax.lax.scan(step, first, jnp.stack([x] * 3))
    n = len(carry.split())
    (scan,) = named("scan", BF16(fun), X)
    found = dtypes(scan.outvars[:n]), dtypes(scan.outvars[n:])
    assert found == (carry.replace("H", "bf16"), stacked.replace("H", "bf16")), name
  assert_near(functions, "fp16")


WHILES = {
  # (condition, body, initial value, dtypes of the carry)
  "sampler": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + attend(c[1])), lambda x: (0, x), "int32 f32"),
  "sum": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + attend(X).sum()), lambda x: (0, 0.0), "int32 f32"),
  "condition on the stream": (lambda c: c.sum() < 5, lambda c: c @ W + 1, lambda x: x * 0, "f32"),
  "next token": (
    lambda c: c[0] < 3, lambda c: (jnp.argmax(c[1] @ W) + c[0] + 1, c[1] @ W), lambda x: (0, x), "int32 bf16"),
  "product in the condition": (lambda c: (c @ jnp.abs(W)).max() < 5, lambda c: c + 1, lambda x: x, "f32"),
}  # fmt: skip


def test_while_carries():
  functions = {}
  for name, (condition, body, first, want) in WHILES.items():
    loop = functools.partial(jax.lax.while_loop, condition, body)
    functions[name] = lambda x, loop=loop, first=first: loop(first(x))
    (equation,) = named("while", BF16(functions[name]), X)
    assert dtypes(equation.outvars) == want, name
  assert_near(functions, "bf16")


def test_a_while_of_which_each_row_has_its_own_end():
  def rows(x):
    loop = lambda row: jax.lax.while_loop(
      lambda c: c[1].sum() < 5, lambda c: (c[0] + 1, 2 * c[1] + jnp.abs(c[1] @ W)), (0, jnp.abs(row))
    )
    return jax.vmap(loop)(x)

  x = X * jnp.arange(1, 9)[:, None] / 4
  steps, values = jit(BF16(rows))(x)
  expected = jit(rows)(x)
  assert len(set(np.asarray(expected[0]).tolist())) > 1
  np.testing.assert_array_equal(steps, expected[0])
  np.testing.assert_allclose(values, expected[1], rtol=0.05)


BRANCHES = {
  "product or nothing": lambda x: jax.lax.cond(x.sum() > 99, product, lambda x: x, x),
  "product or island": lambda x: jax.lax.cond(x.sum() > 99, product, lambda x: jax.nn.softmax(x), x @ W),
  "product or constant": lambda x: jax.lax.cond(x.sum() > 99, product, jnp.zeros_like, x),
  "pinned or product": lambda x: jax.lax.cond(x.sum() > 99, product, lambda x:
    x.astype(jnp.bfloat16).astype(jnp.float32), x @ W),
  "reduction or product": lambda x: jax.lax.cond(x.sum() > 99, lambda x: x.sum(0), lambda x: (x @ W)[0], x),
  "three": lambda x: jax.lax.switch(jnp.int32(x.sum() > 99) + 1,
    [product, jnp.exp, lambda x: x * 2, lambda x: attend(x)], x @ W),
  "two results": lambda x: jax.lax.cond(x.sum() > 99, lambda x: (x @ W, x.sum()), lambda x:
    (jnp.exp(x), (x @ W).max()), x),
  "closures": lambda x: (lambda y: jax.lax.cond(x.sum() > 99, lambda: y @ W, lambda: jnp.tanh(y)))(x @ W),
  "platforms": lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x @ W, cuda=lambda x: x * 2,
    default=lambda x: jnp.exp(x @ W)),
}  # fmt: skip


def test_branches_agree():
  for name, fun in BRANCHES.items():
    for cond in named("cond", BF16(fun), X):
      assert {dtypes(body.outvars) for body in bodies(cond)} == {dtypes(cond.outvars)}, name
    assert " bf16" in " ".join(map(types, named("dot_general", BF16(fun), X))), name
  assert_near(BRANCHES, "fp16", gradient=True)


def test_a_memory_in_one_branch_of_a_cond_is_not_rounded_at_each_step():
  ones = jnp.full((4, 4), 0.25)

  def total(x):
    def step(c, i):
      y = x @ ones  # half precision, and 1 everywhere
      return jax.lax.cond(i >= 0, lambda c, y: c + y, lambda c, y: y, c, y), None

    return jax.lax.scan(step, jnp.zeros(4), jnp.arange(600))[0]

  np.testing.assert_array_equal(jit(BF16(total))(jnp.ones(4)), 600.0)  # bfloat16 stalls at 256


# Foreign code keeps its dtypes and its order


def test_callbacks_run_once_each_in_the_order_of_the_program():
  order = []
  note = lambda name: lambda x: order.append((name, str(x.dtype), int(np.asarray(x)[0, 0])))

  def f(x):
    y = jnp.exp(x * 0) @ jnp.eye(4)
    io_callback(note("first"), None, y, ordered=True)
    z = jax.nn.softmax(y) @ jnp.eye(4)
    io_callback(note("second"), None, z * 8, ordered=True)

    def step(c, _):
      io_callback(note("step"), None, c, ordered=True)
      return c @ jnp.eye(4) + 1, None

    y, _ = jax.lax.scan(step, y, None, 2)
    io_callback(note("unused"), None, x * 0, ordered=True)
    return y

  effects = lambda fun: {str(e) for e in jax.make_jaxpr(fun)(X).effects}
  assert effects(BF16(f)) == effects(f) != set()
  jax.block_until_ready(jax.jit(BF16(f))(X))
  jax.effects_barrier()
  values = [("first", 1), ("second", 2), ("step", 1), ("step", 2), ("unused", 0)]
  assert order == [(name, "float32", value) for name, value in values]


def test_a_checkpoint_policy_saves_products_of_frozen_operands():
  def frozen(w, x):
    h = jnp.tanh(jax.lax.stop_gradient(x @ W) * w[0])  # an adapter on a layer that is not trained
    return (h @ w).sum()

  def products(cast):
    f = cast(jax.checkpoint(frozen, policy=DOTS))
    return sum(e.primitive.name == "dot_general" for e in equations(jax.grad(f), jnp.ones((4, 4)), X))

  assert products(BF16) == products(lambda f: f)


# Sources


def test_an_error_inside_and_nan_checks_point_at_the_users_line():
  def f(x):
    y = x @ W
    return jnp.concatenate([y, y[:, :2]])  # the wrong line

  with pytest.raises(TypeError) as caught:
    jax.eval_shape(BF16(f), X)
  lines = [entry for entry in caught.traceback if "test_higher_order" in str(entry.path)]
  assert "the wrong line" in str(lines[-1].statement)
  with jax.debug_nans(True), pytest.raises(FloatingPointError):
    jit(BF16(lambda x: jnp.log(x @ W * 0 - 1)))(X)
