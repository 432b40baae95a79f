"""The solver of facts: liveness, and what is computed of what, held to derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.jaxpr import live, needed, outputs_of

X = np.arange(1, 4, dtype=np.float32)
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
  jaxpr = traced(two, X, X).jaxpr  # what some outputs need
  x, y = jaxpr.invars
  assert {x, y} <= live(jaxpr).variables
  assert {x, y} & {*live(jaxpr, [True, False]).variables} == {x}
  assert live(jaxpr, [False, False]) == ([], set())


def shift(carry, _):  # a value takes as many steps as there are carries to come out
  a, b, c = carry
  return (a, a * 2, b * 2), c * 3


PROGRAMS = {  # functions of three numbers, with loops of n steps
  "straight": lambda n, x, y, z: (x * y, z, 2.0),
  "dead": lambda n, x, y, z: ((lambda unused: z)(x + y), y),
  "jit": lambda n, x, y, z: jax.jit(lambda a, b: (b * 2, a * 3))(x, y * z),
  "checkpoint": lambda n, *xyz: jax.checkpoint(lambda x, y, z: (jnp.sin(x) * z, y))(*xyz),
  "custom_jvp": lambda n, x, y, z: (jax.nn.softplus(x) * z, y),
  "scan": lambda n, *xyz: jax.lax.scan(shift, xyz, None, length=n),
  "rows": lambda n, x, y, z: jax.lax.scan(lambda c, row: (c + row * z, c), x, y * jnp.ones(n)),
  "nested": lambda n, *xyz: jax.lax.scan(
    lambda c, _: (jax.lax.scan(shift, c, None, length=n)[0], c[1]), xyz, None, length=n
  ),
  "fori": lambda n, *xyz: jax.lax.fori_loop(0, n, lambda _, c: (c[0], c[0] * 2, c[1] + 1), xyz),
  "while": lambda n, x, y, z: jax.lax.while_loop(
    lambda c: c[2] < n, lambda c: (c[1] * 2, c[1] + y, c[2] + 1), (x, y * z, 0)
  ),
  "cond": lambda n, x, y, z: jax.lax.cond(n > 0, lambda a, b: (a, b), lambda a, b: (b, b), x, z),
}


@jax.jit
def moves_of_all(*point):
  """For each program whether a result moves with a number, at some number of steps."""
  flat = lambda program, n: lambda *args: [jnp.sum(x) for x in jax.tree.leaves(program(n, *args))]
  slopes = lambda program, n: jnp.array(jax.jacfwd(flat(program, n), (0, 1, 2))(*point)).T
  return {name: sum(slopes(program, n) != 0 for n in range(5)) > 0 for name, program in PROGRAMS.items()}


POINT = (1.5, 2.0, 3.0)
MOVES = functools.cache(lambda: moves_of_all(*POINT))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_computed_of_what_is_what_moves_with_it_at_some_number_of_steps(name):
  moves = MOVES()[name]
  closed = traced(lambda *args: jax.tree.leaves(PROGRAMS[name](2, *args)), *POINT)
  flags = lambda n: np.eye(n, dtype=bool).tolist()
  np.testing.assert_array_equal([outputs_of(closed, given) for given in flags(3)], moves)
  np.testing.assert_array_equal([needed(closed, given).inputs for given in flags(moves.shape[1])], moves.T)


def test_what_a_choice_follows_from_decides_results():
  chooses = traced(
    lambda p, x, y: jax.lax.cond(p > 0, lambda a, b: (a, 1.0), lambda a, b: (b, 2.0), x, y), *X
  )
  assert outputs_of(chooses, [True, False, False]) == [True, True]
  assert needed(chooses, [False, True]).inputs == [True, False, False]
  loops = traced(
    lambda n, x: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0.0, x))[1], *X[:2]
  )
  assert outputs_of(loops, [True, False]) == [True]
  assert needed(loops, [True]).inputs == [True, True]
