"""Walks over jaxprs: liveness, last reads, evaluation again; bodies and derivative rules."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import (
  alignment,
  bind_again,
  bodies_of,
  closure_as_argument,
  interpret,
  is_variable,
  last_reads,
  live,
  module_path,
  open_jaxpr,
  scan_parts,
)

X = np.arange(3, dtype=np.float32)
traced = lambda fun, *args: jax.make_jaxpr(fun)(*args)
names = lambda equations: [equation.primitive.name for equation in equations]


def two(x, y):
  dead = jnp.cos(x)
  jnp.tan(dead)
  return jnp.sin(x) * 2.0, jnp.exp(y)


def test_what_nothing_reads_is_not_live_and_effects_are():
  assert names(live(traced(two, X, X).jaxpr).equations) == ["sin", "mul", "exp"]
  printing = traced(lambda x: (jax.debug.print("{}", x), jnp.sin(x))[1], X)
  assert len(live(printing.jaxpr).equations) == len(printing.jaxpr.eqns) > 1
  assert names(live(printing.jaxpr, effects=False).equations) == ["sin"]


def test_what_some_outputs_need():
  jaxpr = traced(two, X, X).jaxpr
  x, y = jaxpr.invars
  assert {x, y} <= live(jaxpr).variables
  assert x in live(jaxpr, [True, False]).variables
  assert y not in live(jaxpr, [True, False]).variables
  assert live(jaxpr, [False, False]) == ([], set())


def test_each_variable_is_read_last_once_and_results_never():
  jaxpr = traced(lambda x: (jnp.sin(x) + x, x * 2.0), X).jaxpr
  last = last_reads([equation.invars for equation in jaxpr.eqns], jaxpr.outvars)
  flat = [v for variables in last for v in variables]
  assert len(flat) == len(set(flat))
  assert not set(flat) & {v for v in jaxpr.outvars if is_variable(v)}
  assert jaxpr.invars[0] in last[-1]


def test_a_program_evaluated_again_gives_the_same_in_the_same_scopes():
  def fun(x):
    with jax.named_scope("net"):
      y = jnp.sin(x) + X
      return y, jax.lax.scan(lambda c, a: (c + a, c * a), 1.0, y), 3.0

  closed = traced(fun, X)
  again, plain = jax.jit(lambda x: (interpret(closed, [x], bind_again), jax.tree.leaves(fun(x))))(X)
  for got, want in zip(again, plain, strict=True):
    np.testing.assert_array_equal(got, want)
  whole = traced(lambda x: interpret(closed, [x], bind_again), X)
  assert {module_path(e) for e in whole.jaxpr.eqns if e.primitive.name == "sin"} == {"net"}


def test_a_rule_may_give_other_results():
  closed = traced(lambda x: jnp.sin(jnp.cos(x)), X)
  seen = []

  def rule(equation, operands):
    seen.append(equation.primitive.name)
    return [operands[0] + 1]

  np.testing.assert_array_equal(interpret(closed, [X], rule)[0], X + 2)
  assert seen == ["cos", "sin"]


LOOPS = {  # function of [3], inputs of each body as operands of the call
  "scan": (lambda x: jax.lax.scan(lambda c, a: (c + a * X.sum(), c), 0.0, x), "scan"),
  "while": (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: c + x, x), "while"),
  "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "cond"),
  "jit": (jax.jit(jnp.sin), "jit"),
  "checkpoint": (jax.checkpoint(jnp.sin), "remat2"),
}


def test_inputs_of_bodies_are_operands_of_their_type():
  for name, (fun, primitive) in LOOPS.items():
    (equation,) = (e for e in traced(fun, X).jaxpr.eqns if e.primitive.name == primitive)
    aligned = alignment(equation)
    assert len(aligned) == (2 if name in ("while", "cond") else 1) == len(bodies_of(equation)), name
    stacked = sum(scan_parts(equation)[:2]) if name == "scan" else None
    for body, indices in aligned:
      for variable, i in zip(open_jaxpr(body).invars, indices, strict=True):
        shape = equation.invars[i].aval.shape
        assert variable.aval.shape == (shape if stacked is None or i < stacked else shape[1:]), name


def test_a_closure_is_passed_as_an_argument_and_its_axes_are_named():
  converted, closure, axes = closure_as_argument(lambda x: {"y": x * X}, X)
  assert axes == set()
  np.testing.assert_array_equal(converted([X + 1], X)["y"], (X + 1) * X)
  assert [x.shape for x in closure] == [(3,)]
  summed = lambda x: closure_as_argument(lambda y: jax.lax.psum(y, "rows"), x)[2]
  found = []
  jax.vmap(lambda x: (found.append(summed(x)), x)[1], axis_name="rows")(X)
  assert found == [{"rows"}]
