"""What is in memory at the worst moment of a compiled program, against hand counts and the compiler's own."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from mpjax.planner.compiled import _hlo
from mpjax.planner.compiled._hlo_memory import live_at_peak

pytestmark = pytest.mark.optimised
f32, bf16 = jnp.float32, jnp.bfloat16
A = 32 * 32 * 4  # bytes of an f32[32,32]
X = "f32[32,32]{1,0}"
CHIP = "f32[32,32]{1,0:S(1)}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def live(*lines, computations="", head=""):
  """The worst moment of a main computation of these lines, whose argument is `p`."""
  text = "".join(f"  {line}\n" for line in (f"%p = {X} parameter(0)", *lines))
  return live_at_peak(
    _hlo.parse(
      f"HloModule m, is_scheduled=true{head}\n\n{computations}ENTRY %main (p: {X}) -> {X} {{\n{text}}}\n"
    )
  )


def dot(name, left, right, shape=X):
  return f"%{name} = {shape} dot(%{left}, %{right}), {DOT}"


FUSED = f"""%tanh (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  ROOT %t = {X} tanh(%q)
}}

%half (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  %h = bf16[32,32]{{1,0}} convert(%q)
  ROOT %back = {X} convert(%h)
}}

%turned (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  ROOT %t = {X} transpose(%q), dimensions={{1,0}}
}}

%two (q: {X}) -> ({X}, {X}) {{
  %q = {X} parameter(0)
  %t = {X} tanh(%q)
  %u = {X} transpose(%q), dimensions={{1,0}}
  ROOT %both = ({X}, {X}) tuple(%t, %u)
}}

%twice (q: {X}) -> ({X}, {X}) {{
  %q = {X} parameter(0)
  %t = {X} tanh(%q)
  %u = {X} multiply(%q, %t)
  ROOT %both = ({X}, {X}) tuple(%t, %u)
}}

"""

STRAIGHT = [
  # What is left out is the result, whose memory is idle until it is written: a temporary may lie there.
  ("nothing but the result", [f"ROOT {dot('a', 'p', 'p')}"], 0),
  (
    "a value in the result's memory",
    [dot("a", "p", "p"), dot("b", "a", "p"), f"ROOT {dot('c', 'b', 'p')}"],
    A,
  ),
  (
    "values that are read later",
    [dot("a", "p", "p"), dot("b", "a", "p"), dot("c", "a", "b"), f"ROOT {dot('d', 'a', 'c')}"],
    2 * A,
  ),
  (
    "a view, which keeps what it shows",
    [
      dot("a", "p", "p"),
      "%v = f32[1024]{0} bitcast(%a)",
      dot("b", "p", "p"),
      dot("c", "b", "p"),
      f"%w = {X} bitcast(%v)",
      f"ROOT {dot('d', 'w', 'c')}",
    ],
    2 * A,
  ),
  (
    "a result with a large view of itself",
    [dot("a", "p", "p"), f"ROOT %r = ({X}, {X}) tuple(%a, %p)"],
    0,
  ),
  (
    "nothing on the chip",
    [dot("a", "p", "p", CHIP), dot("b", "a", "p", CHIP), f"ROOT {dot('c', 'a', 'b')}"],
    0,
  ),
  (
    "what is copied from the chip, from the start of the copy on",
    [
      dot("a", "p", "p", CHIP),
      f"%s = ({X}, {CHIP}, u32[]{{:S(2)}}) copy-start(%a)",
      dot("b", "p", "p"),
      f"%d = {X} copy-done(%s)",
      dot("c", "b", "d"),
      f"ROOT {dot('e', 'c', 'd')}",
    ],
    2 * A,
  ),
  (
    "a constant",
    [f"%k = {X} constant({{...}})", f"ROOT {dot('a', 'k', 'p')}"],
    0,
  ),
]


@pytest.mark.parametrize(("lines", "want"), [row[1:] for row in STRAIGHT], ids=[row[0] for row in STRAIGHT])
def test_straight_program(lines, want):
  assert live(*lines).nbytes == want


SHARED, APART = 3 * A, 4 * A


@pytest.mark.parametrize(
  ("middle", "want"),
  [
    ([dot("a", "p", "p"), f"%b = {X} multiply(%a, %a)"], SHARED),
    ([dot("a", "p", "p"), f"%b = {X} fusion(%a), kind=kLoop, calls=%tanh"], SHARED),
    ([dot("a", "p", "p"), f"%b = {X} fusion(%a), kind=kLoop, calls=%half"], SHARED),
    ([dot("a", "p", "p"), f"%b = {X} fusion(%a), kind=kLoop, calls=%turned"], APART),
    ([dot("a", "p", "p"), dot("b", "a", "p")], APART),
    ([f"%b = {X} fusion(%p), kind=kLoop, calls=%tanh"], SHARED),
    (
      [
        dot("a", "p", "p"),
        f"%t = ({X}, {X}) fusion(%a), kind=kLoop, calls=%twice",
        f"%b = {X} get-tuple-element(%t), index=0",
      ],
      SHARED + A,
    ),
    (
      [
        dot("a", "p", "p"),
        f"%t = ({X}, {X}) fusion(%a), kind=kLoop, calls=%two",
        f"%b = {X} get-tuple-element(%t), index=0",
      ],
      APART + A,
    ),
    (
      [
        f"%t = ({X}, f32[]) custom-call(%p)",
        f"%a = {X} get-tuple-element(%t), index=0",
        f"%b = {X} multiply(%a, %a)",
      ],
      APART,
    ),
  ],
  ids=[
    "multiply",
    "fusion",
    "halved",
    "transposed",
    "product",
    "argument",
    "two results",
    "two ways",
    "part of a result",
  ],
)
def test_elementwise_result_is_written_over_what_dies_there(middle, want):
  before = [dot("k", "p", "p"), dot("j", "k", "p")]
  found = live(*before, *middle, "ROOT %r = f32[] custom-call(%b, %k, %j)", computations=FUSED)
  assert found.nbytes == want


def test_donated_argument_is_memory_for_temporaries_after_its_last_read():
  donated = ", input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={()->f32[]}"
  end = ["%s = f32[2]{0} custom-call(%b)", f"ROOT %r = {X} broadcast(%s), dimensions={{}}"]
  early = [dot("a", "p", "p"), dot("b", "a", "a"), *end]
  late = [dot("a", "p", "p"), dot("b", "a", "p"), *end]
  # A result of its own has room for `a`; one in the argument's memory for `b`, or for neither.
  assert live(*early).nbytes == live(*late).nbytes == A + 8
  assert live(*early, head=donated).nbytes == A
  assert live(*late, head=donated).nbytes == 2 * A


def test_updates_in_place_take_no_memory_of_their_own():
  big = "f32[64,1024]{1,0}"
  lines = [
    f"%zero = {big} broadcast(%p), dimensions={{}}",
    "%row = f32[1,1024]{1,0} reshape(%p)",
    f"%one = {big} dynamic-update-slice(%zero, %row, %p, %p)",
    f"%two = {big} dynamic-update-slice(%one, %row, %p, %p)",
    f"%three = {big} scatter(%two, %p, %row), to_apply=%add",
    f"ROOT %sum = {X} custom-call(%three)",
  ]
  # The row is in the result's memory.
  assert live(*lines).nbytes == 64 * 1024 * 4


def test_call_that_writes_over_its_operand():
  aliased = "output_to_operand_aliasing={{0}: (1, {})}"
  call = f"%t = ({X}, s8[100]{{0}}) custom-call(%a, %b), {aliased}"
  lines = [
    dot("a", "p", "p"),
    dot("b", "a", "p"),
    call,
    f"%c = {X} get-tuple-element(%t), index=0",
    "ROOT %d = f32[] custom-call(%c, %a)",
  ]
  assert live(*lines).nbytes == 2 * A + 100
  assert live(*(line.replace(f", {aliased}", "") for line in lines)).nbytes == 3 * A + 100


LOOP = f"""%body (s: (s32[], {X})) -> (s32[], {X}) {{
  %s = (s32[], {X}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = {X} get-tuple-element(%s), index=1
  %a = {X} dot(%x, %x), {DOT}
  %b = {X} dot(%a, %x), {DOT}
  %c = {X} dot(%a, %b), {DOT}
  %n = s32[] custom-call(%i)
  ROOT %t = (s32[], {X}) tuple(%n, %c)
}}

%condition (s: (s32[], {X})) -> pred[] {{
  %s = (s32[], {X}) parameter(0)
  ROOT %less = pred[] custom-call(%s)
}}

%small (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  ROOT %a = {X} dot(%q, %q), {DOT}
}}

%large (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  %a = {X} dot(%q, %q), {DOT}
  %b = {X} dot(%a, %q), {DOT}
  %c = {X} dot(%a, %b), {DOT}
  ROOT %d = {X} dot(%c, %b), {DOT}
}}

"""


def test_loop_has_its_state_once_and_its_bodys_temporaries():
  found = live(
    dot("k", "p", "p"),
    f"%first = {X} multiply(%p, %p)",
    "%n = s32[] constant(0)",
    f"%init = (s32[], {X}) tuple(%n, %first)",
    f"%w = (s32[], {X}) while(%init), condition=%condition, body=%body",
    f"%x = {X} get-tuple-element(%w), index=1",
    "ROOT %r = f32[] custom-call(%x, %k)",
    computations=LOOP,
  )
  # The body's result is written where the state was.
  assert found.at.name == "w"
  assert found.inner.nbytes == 2 * A
  assert found.nbytes == pytest.approx(4 * A, abs=8)  # and the number of the round


def test_conditional_has_its_largest_branch():
  found = live(
    dot("k", "p", "p"),
    f"%c = {X} conditional(%p, %k, %k), branch_computations={{%small, %large}}",
    "ROOT %r = f32[] custom-call(%c, %k)",
    computations=LOOP,
  )
  assert found.at.name == "c"
  assert found.inner.nbytes == 2 * A
  assert found.nbytes == 4 * A


# Programs as this machine's compiler schedules them, beside the temporary memory that it says they take.


def a_shape(*shape, dtype=f32):
  return jax.ShapeDtypeStruct(shape, dtype)


def perceptron(layers, width, batch, dtype=f32, *, scan=False, remat=False):
  """An AdamW step of a chain of products, with its state given up."""
  tx = optax.adamw(1e-3)
  layer = lambda x, w: jnp.tanh(x @ w.astype(dtype))
  layer = jax.checkpoint(layer) if remat else layer

  def loss(params, x):
    x = x.astype(dtype)
    if scan:
      x, _ = lax.scan(lambda c, w: (layer(c, w), None), x, params)
    else:
      for w in params:
        x = layer(x, w)
    return (x.astype(f32) ** 2).mean()

  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = a_shape(layers, width, width) if scan else [a_shape(width, width)] * layers
  return step, (params, jax.eval_shape(tx.init, params), a_shape(batch, width)), (0, 1)


def convolutions():
  def step(params, x):
    def loss(params):
      h = x
      for w in params:
        h = jax.nn.relu(
          lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
      return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  return step, ([a_shape(3, 3, 16, 16)] * 4, a_shape(32, 16, 16, 16)), (0,)


def filling(rows, width):
  """A buffer that a loop fills in place."""

  def fill(x):
    write = lambda i, buffer: lax.dynamic_update_index_in_dim(buffer, jnp.sin(x * i), i, 0)
    return lax.fori_loop(0, rows, write, jnp.zeros((rows, width))).sum(0)

  return fill, (a_shape(width),), ()


def updating(rows, width):
  def update(a, x, at):
    a = jnp.sin(a)
    for i in range(3):
      a = lax.dynamic_update_slice(a, x[None] * (i + 1), (at[i], 0))
    return jnp.cos(a) @ jnp.ones((width, width))

  return update, (a_shape(rows, width), a_shape(width), a_shape(3, dtype=jnp.int32)), ()


def scattering(rows, width):
  add = lambda table, at, x: jnp.tanh((table * 2).at[at].add(x)) @ jnp.ones((width, width))
  return add, (a_shape(rows, width), a_shape(32, dtype=jnp.int32), a_shape(32, width)), ()


def branching(width):
  branches = (lambda x: (x @ x @ x).sum(), lambda x: jnp.sin(x).sum())
  return lambda x, c: lax.cond(c > 0, *branches, x), (a_shape(width, width), a_shape()), ()


def looping(length, width):
  def body(c, _):
    h = jnp.tanh(c @ c)
    return jnp.sin(h @ h @ h), None

  return lambda x: lax.scan(body, jnp.sin(x), None, length=length)[0], (a_shape(width, width),), ()


PROGRAMS = {
  "step": (perceptron(6, 256, 2048), 0.05),
  "step in half precision": (perceptron(6, 256, 512, bf16), 0.02),
  "step of wide layers": (perceptron(4, 512, 32), 0.02),
  "step that computes again": (perceptron(6, 256, 2048, remat=True), 0.05),
  "step of a scan": (perceptron(6, 128, 2048, scan=True), 0.05),
  "step of a scan in half precision": (perceptron(6, 256, 512, bf16, scan=True), 0.02),
  "step of convolutions": (convolutions(), 0.02),
  "filling": (filling(64, 4096), 0.03),
  "updating": (updating(64, 512), 0.02),
  "scattering": (scattering(1024, 128), 0.02),
  "branching": (branching(256), 0.02),
  "looping": (looping(5, 256), 0.02),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_worst_moment_takes_the_temporary_memory_of_the_compiler(name):
  (function, args, donated), near = PROGRAMS[name]
  compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile()
  found = live_at_peak(_hlo.parse(compiled.as_text()))
  assert found.nbytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=near)
  assert (
    sum(buffer.nbytes for buffer in found.buffers) + (found.inner.nbytes if found.inner else 0)
    == found.nbytes
  )


def test_activations_are_among_what_is_live():
  function, args, donated = perceptron(6, 256, 2048)
  compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile()
  found = live_at_peak(_hlo.parse(compiled.as_text()))
  activations = [b for b in found.buffers if b.maker.shapes[b.index].dims == (2048, 256)]
  # Of each layer its result, and what the worst moment works on.
  assert 6 <= len(activations) <= 8
  assert all(buffer.readers for buffer in activations)
