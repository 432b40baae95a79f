"""The structure of a jaxpr: equal where two traces gave the same program."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import structure_of

X = np.ones((2, 3), np.float32)
traced = lambda fun, *args: jax.make_jaxpr(lambda *args: fun(*args))(*args)
PROGRAMS = {  # no two are alike
  "sin": (jnp.sin, X),
  "cos": (jnp.cos, X),
  "scope": (jax.named_scope("here")(jnp.sin), X),
  "shape": (jnp.sin, X[:1]),
  "literal": (lambda x: x * 2.0, X),
  "other literal": (lambda x: x * 3.0, X),
  "zero": (lambda x: x * 0.0, X),
  "negative zero": (lambda x: x * -0.0, X),
  "constant": (lambda x: x + np.arange(3, dtype=np.float32), X),
  "parameter": (lambda x: x.sum(0), X),
  "other parameter": (lambda x: x.sum(1), X),
  "order": (lambda x, y: x - y, X, X),
  "other order": (lambda x, y: y - x, X, X),
  "result": (lambda x: (x, jnp.sin(x)), X),
  "other result": (lambda x: (jnp.sin(x), x), X),
  "body": (lambda x: jax.jit(lambda x: jnp.sin(x) + 1)(x), X),
  "other body": (lambda x: jax.jit(lambda x: jnp.sin(x) + 2)(x), X),
  "scan": (lambda x: jax.lax.scan(lambda c, row: (c + row, jnp.sin(row)), x[0], x), X),
  "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X),
  "checkpoint": (jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable), X),
  "gradient": (jax.grad(lambda x: jnp.tanh(x).sum()), X),
}


def test_two_traces_have_one_structure_and_no_two_programs_do():
  structures = {name: structure_of(traced(fun, *args)) for name, (fun, *args) in PROGRAMS.items()}
  assert None not in structures.values()
  assert len(set(structures.values())) == len(PROGRAMS)
  for name, (fun, *args) in PROGRAMS.items():
    assert structure_of(traced(fun, *args)) == structures[name], name


def test_a_program_with_a_derivative_rule_cannot_be_compared():
  rule = jax.custom_jvp(jnp.sin)
  rule.defjvps(lambda ct, out, x: 2 * ct)
  assert structure_of(traced(rule, X)) is None
