"""The analytic peak: bounds that hold for any program, and small programs whose peak is known."""

import functools

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st

from mpjax.planner._from_jaxpr import from_jaxpr
from mpjax.planner._memory import stored_program
from mpjax.planner._program import live_at_peak, total_bytes  # a plan shows the peak of a whole step alone

F32 = jnp.float32
S = jax.ShapeDtypeStruct
N = 32
KINDS = ("cpu", "gpu", "tpu")
SQUARE = 4 * N * N  # bytes
MATRIX = [S((N, N), F32)] * 2


def graph_of(function, *args):
  return from_jaxpr(jax.make_jaxpr(function)(*args))


def program_of(function, *args, donated=(), kind="gpu"):
  """What a function stores; `donated` are positions of arguments."""
  graph = graph_of(function, *args)
  return stored_program(graph, kind, [graph.arguments[i] for i in donated])


def peak_of(function, *args, **options):
  """The peak of a function, the arguments apart."""
  return live_at_peak(program_of(function, *args, **options))


# Programs at random: each operation reads values that there are already.

root = lambda x: jnp.abs(x) ** 0.5
UNARY = {"tanh": jnp.tanh, "double": lambda x: x * 2, "transpose": jnp.transpose, "root": root}
BINARY = {"add": jnp.add, "times": jnp.multiply, "product": jnp.matmul}

operation = st.one_of(
  st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 99)),
  st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 99), st.integers(0, 99)),
)
programs = st.tuples(st.lists(operation, min_size=1, max_size=8), st.integers(1, 3))


def function_of(program):
  operations, results = program

  def run(*args):
    values = list(args)
    for name, *operands in operations:
      values.append((UNARY | BINARY)[name](*(values[i % len(values)] for i in operands)))
    return tuple(values[-results:])

  return run


@settings(max_examples=60, deadline=None)
@given(programs, st.sampled_from(KINDS))
def test_peak_of_any_program(program, kind):
  function = function_of(program)
  found = program_of(function, *MATRIX, kind=kind)
  peak = live_at_peak(found)
  written = [b for operation in found.operations for b in operation.writes]
  # It is between the largest value and all of them.
  assert peak.nbytes <= total_bytes(written) + len(found.results) * SQUARE
  assert peak.nbytes >= max((b.nbytes for b in written if b not in found.given), default=0)
  assert peak.nbytes == total_bytes(peak.live)
  # Donation never raises it.
  some = [peak_of(function, *MATRIX, kind=kind, donated=range(n)).nbytes for n in range(len(MATRIX) + 1)]
  assert some == sorted(some, reverse=True)
  # Every value is computed before it is read, once.
  made = set()
  for operation in found.operations:
    assert all(b in made or b not in written for b in operation.reads)
    assert made.isdisjoint(operation.writes)
    made.update(operation.writes)


# Programs whose peak is known, in arrays of N x N.


def chain(x, w, *, length):
  for _ in range(length):
    x = x @ w
  return x


def looped(x, w):
  return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)[0]


# Function, least and most arrays at one time.
CASES = {
  "one product": (jnp.matmul, 1, 1),
  "chain of 2": (functools.partial(chain, length=2), 2, 2),
  "chain of 20 frees what was read": (functools.partial(chain, length=20), 2, 2),
  "elementwise operations store the result alone": (lambda x, w: jnp.tanh(x) * 2 + jnp.abs(w), 1, 1),
  "views store nothing": (lambda x, w: jnp.matmul(x.T.reshape(N, N), w).T, 1, 1),
  "values that are read again stay": (lambda x, w: (lambda y: (y @ y) @ (y @ y.T))(x @ w), 3, 4),
  "a loop has its carry and a step's values": (looped, 1, 4),
  "what a loop stacks is there at once": (
    lambda x, w: jax.lax.scan(lambda c, _: (c @ w, c), x, length=5)[1],
    5,
    8,
  ),
  "a branch has its own values": (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x), 2, 3),
  "two results": (lambda x, w: (x @ w, w @ x), 2, 2),
}


def test_peak_of_a_small_program():
  for name, (function, least, most) in CASES.items():
    assert least * SQUARE <= peak_of(function, *MATRIX).nbytes <= most * SQUARE, name
