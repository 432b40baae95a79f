"""Values that an inspection looks at: which, under what names, and that looking changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._conformance import normal
from tests.casting._jaxprs import jit
from tests.numerics._faults import line_of

N = 16  # FP8 products take multiples of 16
W = {"a": normal(N, N, scale=0.25), "b": normal(N, N, seed=2, scale=0.25)}
X = normal(N, N, seed=1)
FP8 = {"recipe": "delayed", "emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}
FP16 = {"base": "fp16", "loss_scaling": None}
OVERRIDES = FP16 | {"overrides": {"layer/a": "bf16", "layer/b": "fp32"}}


def layer(w, x):
  """Two modules with a product each, an island, and a residual."""
  with jax.named_scope("layer"):
    with jax.named_scope("a"):
      y = jnp.tanh(x @ w["a"])  # line of: a
    with jax.named_scope("b"):
      y = jax.nn.softmax(y @ w["b"])  # line of: b
    return x + y  # line of: layer


def looped(f, length):
  """Layers, each with weights of its own."""

  def run(w, x):
    weights = jax.tree.map(lambda a: jnp.broadcast_to(a, (length, *a.shape)), w)
    scales = jnp.linspace(1.0, 0.5, length)
    return jax.lax.scan(lambda c, xs: (f(xs[0], c) * xs[1], None), x, (weights, scales))[0]

  return run


def recurrent(f, length):
  """Steps of time, all with the same weights."""
  return lambda w, x: jax.lax.scan(lambda c, y: (f(w, c) * y, None), x, jnp.linspace(1.0, 0.5, length))[0]


def with_vjp(f):
  g = jax.custom_vjp(lambda w, x: f(w, x))
  g.defvjp(lambda w, x: (f(w, x), (w, x)), lambda r, g: jax.vjp(f, *r)[1](g))
  return g


def sharded(f):
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))


def mixed(w, x):
  x = looped(jax.checkpoint(layer), 3)(w, jax.jit(jnp.negative)(x))
  return jax.lax.cond(x[0, 0] > 0, lambda x: layer(w, x), lambda x: x @ w["a"], x)


PROGRAMS = {
  "plain": layer,
  "scan": looped(layer, 3),
  "long scan": looped(layer, 129),
  "time": recurrent(layer, 3),
  "jit in checkpoint in scan": looped(jax.checkpoint(jax.jit(layer)), 3),
  "cond": lambda w, x: jax.lax.cond(x[0, 0] > 5, lambda x: x, lambda x: layer(w, x), x),
  "custom_vjp": with_vjp(layer),
  "while_loop": lambda w, x: jax.lax.stop_gradient(
    jax.lax.fori_loop(0, jnp.int32(x[0, 0]) + 2, lambda i, y: layer(w, y), x)
  ),
  "shard_map": sharded(layer),
  "mixed": mixed,
}


def loss_of(program):
  return lambda w, x: jnp.mean(PROGRAMS[program](w, x) ** 2)


def inspected(program, policy=FP16):
  return mpjax.inspect_numerics(loss_of(program), W, X, policy=policy, advise=False)


@pytest.mark.parametrize(
  ("program", "policy"), [*((program, FP16) for program in PROGRAMS), ("plain", OVERRIDES)], ids=str
)
def test_looking_changes_nothing(program, policy):
  report = inspected(program, policy)
  value, grads = jit(jax.value_and_grad(mpjax.autocast(loss_of(program), policy)))(W, X)
  assert report.loss == pytest.approx(float(value), rel=1e-4)
  for t in report.of("weight gradient"):
    assert t.norm == pytest.approx(np.linalg.norm(grads[t.path]), rel=0.03)


LAYER = [
  ("layer/a", "dot_general", "a"),
  ("layer/a", "tanh", "a"),
  ("layer/b", "dot_general", "b"),
  ("layer/b", "div", "b"),
  ("layer", "add", "layer"),
]
# The steps that are looked at apart, and how often a value is computed in each of them.
STEPS = {
  "plain": ([""], 1),
  "scan": (["[0]", "[1]", "[2]"], 1),
  "long scan": ([""], 129),
  "time": ([""], 3),
  "jit in checkpoint in scan": (["[0]", "[1]", "[2]"], 1),
  "cond": ([""], 1),
}
# Bodies whose values are seen as one: their results are, not what is inside.
OPAQUE = {"custom_vjp": "custom_vjp_call", "shard_map": "shard_map"}


@pytest.mark.parametrize("policy", [FP16, "fp32", {"base": "fp8", "fp8": FP8}], ids=["fp16", "fp32", "fp8"])
def test_what_leaves_a_module_and_what_products_read_and_give_is_found_in_the_order_of_the_program(policy):
  for program, (steps, times) in STEPS.items():
    known = [
      (module + step, name, line_of(place, __file__), times * N * N)
      for module, name, place in LAYER
      for step in steps
    ]
    found = [
      (t.module, t.name, t.line, t.magnitudes.count) for t in inspected(program, policy).of("activation")
    ]
    assert [point for point in found if point in known] == known, program
    assert len([point for point in found if point[0]]) <= len(known) + len(steps), program


def test_bodies_that_are_not_entered_are_seen_from_outside():
  for program, name in OPAQUE.items():
    (t,) = inspected(program).of("activation")
    assert (t.name, t.shape) == (name, (N, N))


def test_a_branch_that_is_not_taken_is_not_counted():
  fun = lambda w, x: jax.lax.cond(x[0, 0] > 1e6, lambda x: layer(w, x), lambda x: x @ w["b"], x)
  report = mpjax.inspect_numerics(lambda w, x: jnp.mean(fun(w, x)), W, X, policy=FP16, advise=False)
  assert {t.module for t in report.of("activation")} == {""}
