"""The structure of a jaxpr: equal where two traces gave the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.jaxpr import structure_of

X = np.ones((2, 3), np.float32)


def traced(fun, *args):
  return jax.make_jaxpr(lambda *args: fun(*args))(*args)


def scoped(x):
  with jax.named_scope("here"):
    return jnp.sin(x)


@pytest.mark.parametrize(
  "fun",
  [
    lambda x: jnp.sin(x) + 2.0,
    lambda x: x + np.arange(3, dtype=np.float32),
    lambda x: jax.lax.scan(lambda c, row: (c + row, jnp.sin(row)), x[0], x),
    lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    lambda x: jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable)(x),
    jax.grad(lambda x: jnp.tanh(x).sum()),
  ],
  ids=["literal", "constant", "scan", "cond", "checkpoint", "grad"],
)
def test_two_traces_of_one_function_have_one_structure(fun):
  first, second = traced(fun, X), traced(fun, X)
  assert first is not second
  assert structure_of(first) == structure_of(second)
  assert hash(structure_of(first)) == hash(structure_of(second))


def test_what_makes_another_program():
  programs = {
    "sin": traced(jnp.sin, X),
    "cos": traced(jnp.cos, X),
    "scope": traced(scoped, X),
    "shape": traced(jnp.sin, X[:1]),
    "literal": traced(lambda x: x * 2.0, X),
    "other literal": traced(lambda x: x * 3.0, X),
    "zero": traced(lambda x: x * 0.0, X),
    "negative zero": traced(lambda x: x * -0.0, X),
    "parameter": traced(lambda x: x.sum(0), X),
    "other parameter": traced(lambda x: x.sum(1), X),
    "order": traced(lambda x, y: x - y, X, X),
    "other order": traced(lambda x, y: y - x, X, X),
    "result": traced(lambda x: (x, jnp.sin(x)), X),
    "other result": traced(lambda x: (jnp.sin(x), x), X),
    "body": traced(lambda x: jax.jit(lambda x: jnp.sin(x) + 1)(x), X),
    "other body": traced(lambda x: jax.jit(lambda x: jnp.sin(x) + 2)(x), X),
  }
  structures = list(map(structure_of, programs.values()))
  assert len(set(structures)) == len(programs)


def test_a_program_with_a_derivative_rule_cannot_be_compared():
  rule = jax.custom_jvp(jnp.sin)
  rule.defjvps(lambda ct, out, x: 2 * ct)
  assert structure_of(traced(rule, X)) is None
