"""The evaluator of jaxprs, and closures."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import (
  bind_again,
  closure_as_argument,
  interpret,
  module_path,
)

X = np.arange(3, dtype=np.float32)
traced = lambda fun, *args: jax.make_jaxpr(fun)(*args)


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


def test_what_no_chosen_output_needs_is_left_out():
  def fun(x, y):
    jnp.cos(y)
    jax.debug.callback(lambda _: None, x + 1)
    return jnp.sin(x), jnp.exp(y), jnp.tanh(x)

  seen = []

  def rule(equation, operands):
    seen.append(equation.primitive.name)
    return bind_again(equation, operands)

  closed = traced(fun, X, X)
  found = interpret(closed, [X, None], rule, [True, False, True], effects=False)
  assert seen == ["sin", "tanh"]
  np.testing.assert_allclose(found, [np.sin(X), np.tanh(X)], rtol=1e-6)
  seen.clear()
  interpret(closed, [X, X], rule)
  assert "cos" not in seen
  assert "debug_callback" in seen


def test_a_value_lives_until_its_last_read_and_one_that_nothing_reads_does_not():
  alive = weakref.WeakSet()

  def rule(equation, operands):
    counts.append(len(alive))
    results = [type("Value", (), {})() for _ in equation.outvars]
    alive.update(results)
    return results

  counts = []
  interpret(traced(lambda x: jnp.sin(jax.lax.cos(jax.lax.top_k(x, 2)[0])), X), iter([X]), rule)
  assert counts == [0, 1, 1]  # of the two results of `top_k` one, which `cos` reads; then that of `cos`


def test_a_closure_is_passed_as_an_argument_and_its_axes_are_named():
  converted, closure, axes = closure_as_argument(lambda x: {"y": x * X}, X)
  assert axes == set()
  np.testing.assert_array_equal(converted([X + 1], X)["y"], (X + 1) * X)
  assert [x.shape for x in closure] == [(3,)]
  summed = lambda x: closure_as_argument(lambda y: jax.lax.psum(y, "rows"), x)[2]
  found = []
  jax.vmap(lambda x: (found.append(summed(x)), x)[1], axis_name="rows")(X)
  assert found == [{"rows"}]
