"""Values that are looked at: which, under what names, and that looking changes nothing."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import get_policy

# What reports of numbers show is what is found here; from outside it is rounded and merged.
from mpjax.numerics._points import find_points, watched
from tests.casting._conformance import leaf_failures, normal
from tests.casting._jaxprs import jit

N = 16  # FP8 products take multiples of 16
W = {"a": normal(N, N, scale=0.25), "b": normal(N, N, seed=2, scale=0.25)}
X = normal(N, N, seed=1)
_FP8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}
POLICIES = {
  "fp32": get_policy("fp32"),
  "bf16": get_policy("bf16"),
  "fp16": get_policy("fp16"),
  "overrides": get_policy({"base": "fp16", "overrides": {"layer/a": "bf16", "layer/b": "fp32"}}),
  "fp8": get_policy({"base": "fp8", "fp8": {"recipe": "current", **_FP8}}),
  "delayed": get_policy({"base": "fp8", "fp8": {"recipe": "delayed", "amax_history_len": 4, **_FP8}}),
}


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
    scales = 1 - 0.1 * jnp.arange(length)
    return jax.lax.scan(lambda c, xs: (f(xs[0], c) * xs[1], None), x, (weights, scales))[0]

  return run


def recurrent(f, length):
  """Steps of time, all with the same weights."""
  return lambda w, x: jax.lax.scan(lambda c, y: (f(w, c) * y, None), x, 1 - 0.1 * jnp.arange(length))[0]


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
# Bodies whose values are seen as one: their results are, not what is inside.
OPAQUE = {"custom_vjp": "custom_vjp_call", "while_loop": "while", "shard_map": "shard_map"}


@jax.custom_vjp
def at_each(x, probe):
  """`x`; the probe's cotangent is (number, sum) of `x` and of its cotangent."""
  return x


def kept_of(x):
  return jnp.stack([jnp.float32(x.size), jnp.sum(x, dtype=jnp.float32)])


at_each.defvjp(lambda x, probe: (x, kept_of(x)), lambda kept, ct: (ct, jnp.stack([kept, kept_of(ct)])))


def probes_of(points):
  return [np.zeros((*point.steps, *point.repeats, 2, 2), np.float32) for point in points]


def seen(points, kept):
  """(module, name, step) of each value, to (count of the values, of the cotangents)."""
  return {
    (point.module, point.name, index): tuple(np.asarray(rows)[index][..., 0].reshape(-1, 2).sum(0).tolist())
    for point, rows in zip(points, kept, strict=True)
    for index in np.ndindex(*point.steps)
  }


def differentiated(fun, argnums=(0,), has_aux=False):
  """Results, and gradients that every value has a part in."""

  def total(*args):
    out = fun(*args)
    out, aux = out if has_aux else (out, None)
    return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), (out, aux)

  return jax.value_and_grad(total, argnums=argnums, has_aux=True)


def compare(fun, policy, args, argnums=(0, 1), **options):
  """What looking found, after it has been seen to change neither results nor gradients."""
  points = find_points(fun, policy)(*args)

  state = {}
  if policy is not None and policy.fp8 is not None and policy.fp8.recipe == "delayed":
    state = mpjax.init_fp8_state(fun, policy)(*args)
    assert jax.tree.leaves(state)

  def plain(state, *args):
    if policy is None:
      return fun(*args)
    return mpjax.autocast(fun, policy, fp8_state=state or None, **options)(*args)

  def looked(state, probes, *args):
    return watched(fun, policy, probes, at_each, fp8_state=state or None, **options)(*args)

  shifted = lambda n: tuple(i + n for i in argnums)
  want = jit(differentiated(plain, (0, *shifted(1))))(state, *args)
  (value, (fp8, kept, *grads)) = jit(differentiated(looked, (0, 1, *shifted(2))))(
    state, probes_of(points), *args
  )
  assert [*leaf_failures("output", (value, (fp8, *grads)), want, 0.0)] == []
  return points, seen(points, kept)


@pytest.mark.parametrize(
  ("program", "policy"),
  [
    *((program, "fp16") for program in PROGRAMS if program not in ("scan", "cond")),  # below
    ("custom_vjp", None),
    ("plain", "overrides"),
    ("plain", "delayed"),
  ],
)
def test_looking_changes_nothing(program, policy):
  compare(PROGRAMS[program], policy and POLICIES[policy], (W, X))


def test_points_do_not_depend_on_the_policy():
  for program, fun in PROGRAMS.items():
    known = lambda policy, fun=fun: [
      (p.module, p.name, p.line, p.shape, p.steps) for p in find_points(fun, policy)(W, X)
    ]
    as_written = known(None)
    assert len(set(as_written)) == len(as_written) > 0, program
    for policy in ("fp32", "fp16", "overrides", "delayed"):
      assert known(POLICIES[policy]) == as_written, (program, policy)


def line(name):
  lines = pathlib.Path(__file__).read_text().splitlines()
  (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# line of: {name}")]
  return f"{pathlib.Path(__file__).name}:{number}"


LAYER = [
  ("layer/a", "dot_general", "a"),
  ("layer/a", "tanh", "a"),
  ("layer/b", "dot_general", "b"),
  ("layer/b", "div", "b"),
  ("layer", "add", "layer"),
]
STEPS = {
  "plain": (),
  "scan": (3,),
  "long scan": (),
  "time": (),
  "jit in checkpoint in scan": (3,),
  "cond": (),
}


def test_what_leaves_a_module_and_what_products_read_and_give_is_found_in_the_order_of_the_program():
  for program, steps in STEPS.items():
    points = [p for p in find_points(PROGRAMS[program], None)(W, X) if p.module]
    found = [(p.module, p.name, p.line, p.shape, p.steps) for p in points]
    known = [(m, name, line(place), (N, N), steps) for m, name, place in LAYER]
    assert [point for point in found if point in known] == known, program
    assert {m for m, *_ in found} == {"layer/a", "layer/b", "layer"}, program
    assert len(found) <= len(known) + 1, program


def test_bodies_that_are_not_entered_are_seen_from_outside():
  for program, name in OPAQUE.items():
    (point,) = find_points(PROGRAMS[program], POLICIES["fp16"])(W, X)
    assert (point.name, point.shape) == (name, (N, N))


@pytest.mark.parametrize(("lengths", "steps"), [((3, 2), (3, 2)), ((128,), (128,)), ((129,), ())])
def test_rows_are_the_steps_in_order(lengths, steps):
  def program(w, x):
    with jax.named_scope("product"):
      return x @ w

  def around(f, length):
    copies = lambda w: jnp.broadcast_to(w, (length, *w.shape))
    return lambda w, x: jax.lax.scan(lambda c, w: (f(w, c), None), x, copies(w))[0]

  fun = functools.reduce(around, reversed(lengths), program)
  args = np.full((2, 2), 0.75, np.float32), np.ones((2, 2), np.float32)
  points = find_points(fun, None)(*args)
  (at,) = [i for i, p in enumerate(points) if p.module == "product"]
  assert points[at].steps == steps
  run = lambda probes: jnp.sum(watched(fun, None, probes, at_each)(*args))
  kept = np.asarray(jit(jax.grad(run))(probes_of(points))[at])
  assert kept.shape == (*lengths, 2, 2)
  n = int(np.prod(lengths))
  forward = 4 * 1.5 ** np.arange(1, n + 1)
  want = np.stack([forward, 4 * 1.5 ** np.arange(n - 1, -1, -1)], 1)
  np.testing.assert_allclose(kept[..., 1].reshape(n, 2), want, rtol=1e-5)


@pytest.mark.parametrize("program", ["cond", "scan"])
def test_values_are_counted_once_for_each_time_they_are_computed(program):
  _, found = compare(PROGRAMS[program], POLICIES["fp16"], (W, X))
  assert set(found.values()) == {(N * N, N * N)}


def test_a_branch_that_is_not_taken_is_not_counted():
  fun = lambda w, x: jax.lax.cond(x[0, 0] > 1e6, lambda x: layer(w, x), lambda x: x @ w["b"], x)
  _, found = compare(fun, POLICIES["fp16"], (W, X))
  assert {count for (module, _, _), count in found.items() if module} == {(0.0, 0.0)}
  assert (N * N, N * N) in {count for (module, _, _), count in found.items() if not module}
