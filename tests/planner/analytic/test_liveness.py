"""The analytic peak: bounds that hold for any program, and small programs whose peak is known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

from mpjax import _compat  # which release's compiler a peak is of
from mpjax.jaxpr import BACKWARD, FORWARD
from mpjax.planner.analytic import make_graph
from mpjax.planner.analytic._graph import merged  # a plan shows the peak of a whole step alone
from mpjax.planner.analytic._liveness import Traits, peak, traits_of

F32, BF16 = jnp.float32, jnp.bfloat16
S = jax.ShapeDtypeStruct
N = 32
KINDS = ("cpu", "gpu", "tpu")
SQUARE = 4 * N * N  # bytes
MATRIX = [S((N, N), F32)] * 2
# As the program says: nothing is widened, halved or kept for other reasons.
PLAIN = Traits()


def graph_of(function, *args, regions=False):
  return merged(make_graph(jax.make_jaxpr(function)(*args)), through_regions=regions)


def peak_of(function, *args, donated=(), traits=PLAIN):
  """The peak of a function, the arguments apart; `donated` are positions of arguments."""
  graph = graph_of(function, *args)
  return peak(graph, traits, size=lambda v: v.nbytes, reusable=[graph.arguments[i] for i in donated])


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
@given(programs, st.sampled_from(KINDS), st.integers(2, 5))
def test_peak_of_any_program(program, kind, factor):
  graph = graph_of(function_of(program), *MATRIX)
  size = lambda v: v.nbytes
  # It is between the largest value and all of them.
  found = peak(graph, traits_of(kind), size=size)
  computed = [value for operation in graph.operations for value in operation.results]
  copies = len(graph.results)  # of a result that is an argument, or another result
  assert found.nbytes <= sum(value.nbytes for value in computed) + copies * SQUARE
  stored = [value for step in found.order for value in step.writes]
  assert found.nbytes >= max((found.size(value) for value in stored), default=0)
  assert found.nbytes % (SQUARE // 2) == 0
  # Donation never raises it.
  number = range(len(graph.arguments) + 1)
  some = [peak(graph, traits_of(kind), size=size, reusable=graph.arguments[:n]).nbytes for n in number]
  assert some == sorted(some, reverse=True)
  # Every value is computed before it is read, once.
  plain, made = peak(graph, PLAIN, size=size), set()
  written = {id(v) for step in plain.order for v in step.writes}
  for step in plain.order:
    assert all(id(v) in made or id(v) not in written for v in step.reads)
    assert made.isdisjoint({id(v) for v in step.writes})
    made |= {id(v) for v in step.writes}
  # It grows with the values.
  assert peak(graph, PLAIN, size=lambda v: factor * v.nbytes).nbytes == factor * plain.nbytes


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


def test_long_chain_has_no_more_than_a_short_one():
  for kind in KINDS:
    of = lambda n, kind=kind: peak_of(functools.partial(chain, length=n), *MATRIX, traits=traits_of(kind))
    assert of(3).nbytes == of(30).nbytes <= 3 * SQUARE, kind


def test_a_donated_argument_gives_its_memory_to_a_result_like_it():
  update = lambda params, gradient: params - 0.1 * gradient
  assert peak_of(update, *MATRIX).nbytes == SQUARE
  assert peak_of(update, *MATRIX, donated=[0]).nbytes == 0
  assert peak_of(lambda x, w: (x @ w).astype(BF16), *MATRIX, donated=[0]).nbytes > 0  # of another dtype


ROWS = S((64 * N, N), F32)
ACTIVATION = 4 * 64 * N * N


def layers(ws, x):
  for w in ws:
    x = jnp.tanh(x @ w)
  return jnp.sum(x * x)


def test_the_backward_pass_keeps_an_activation_a_layer():
  for length in (1, 2, 8):
    found = peak_of(jax.grad(layers), [MATRIX[0]] * length, ROWS)
    assert sum(v.nbytes for v in found.saved) == length * ACTIVATION, length
    assert {(v.maker.name, v.maker.phase) for v in found.saved} == {("tanh", FORWARD)}, length
    assert length * ACTIVATION <= found.nbytes <= (length + 2) * ACTIVATION + length * SQUARE, length


def test_a_checkpointed_layer_keeps_its_input_alone():
  deep = lambda x, w: jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
  loss = lambda layer: lambda ws, x: jnp.sum(functools.reduce(layer, ws, x))
  args = [MATRIX[0]] * 4, ROWS
  plain, checkpointed = (peak_of(jax.grad(loss(layer)), *args) for layer in (deep, jax.checkpoint(deep)))
  saved = [sum(v.nbytes for v in one.saved) // ACTIVATION for one in (plain, checkpointed)]
  assert saved == [3 * 4, 4 - 1]  # the first layer's input is an argument
  assert checkpointed.nbytes < plain.nbytes


@pytest.mark.parametrize("newer", [False, True])
def test_half_precision_halves_what_is_kept_but_by_an_older_compiler_for_cpus(newer, monkeypatch):
  monkeypatch.setattr(_compat, "has_newer_xla", lambda: newer)

  def kept(kind, dtype):
    args = [S((N, N), dtype)] * 6, S(ROWS.shape, dtype)
    found = peak_of(jax.grad(layers), *args, traits=traits_of(kind))
    return sum(found.size(v) for v in found.saved)

  assert kept("gpu", BF16) * 2 == kept("gpu", F32)
  assert kept("cpu", BF16) * (2 if newer else 1) == kept("cpu", F32)


def test_gradients_of_a_scan_are_counted_in_its_stack():
  loss = lambda ws, x: jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0])
  found = peak_of(jax.grad(loss), S((6, N, N), F32), ROWS)
  assert 6 * ACTIVATION <= found.nbytes <= (3 * 6 + 3) * ACTIVATION
  assert sum(v.nbytes for v in found.saved) >= 6 * ACTIVATION


# The graph that the peak is of.


def test_nothing_unread_is_in_the_graph_and_calls_are_entered_but_loops_are_not():
  graph = make_graph(jax.make_jaxpr(lambda x, w: ((x @ w).sum(), x + 1)[1])(*MATRIX))
  assert [operation.name for operation in graph.operations] == ["add"]
  inner = jax.jit(lambda x, w: jax.checkpoint(jnp.matmul)(x, w) + 1)
  graph = make_graph(jax.make_jaxpr(lambda x, w: (inner(x, w), looped(x, w)))(*MATRIX))
  names = [operation.name for operation in graph.operations]
  assert names.count("dot_general") == 1
  assert names.count("scan") == 1
  times = {(o.name, times) for o, times in graph.every_operation() if o.flops}
  assert times == {("dot_general", 1), ("dot_general", 5)}


def test_what_is_computed_twice_is_merged_unless_it_is_to_be_recomputed():
  twice = lambda x, w: jnp.tanh(x @ w) + jnp.exp(x @ w)
  products = lambda graph: sum(bool(o.flops) for o in graph.operations)
  assert products(graph_of(twice, *MATRIX)) == 1
  gradient = jax.grad(lambda x, w: jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ w) ** 2)(x)))
  both = lambda x, w: (gradient(x, w), jnp.sum(jnp.tanh(x @ w) ** 2))
  # x @ w, again, and the gradient's; on a CPU it is not again
  assert [products(graph_of(both, *MATRIX, regions=through)) for through in (False, True)] == [3, 2]


def test_phases_are_told_from_each_other():
  step = lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
  graph = make_graph(jax.make_jaxpr(step)(*MATRIX))
  phases = {}
  for operation in graph.operations:
    phases.setdefault(operation.name, []).append(operation.phase)
  assert phases["dot_general"] == [FORWARD, BACKWARD]
  assert phases["tanh"] == [FORWARD]
  assert phases["sub"][-1] == ""
