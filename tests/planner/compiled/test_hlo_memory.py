"""What is in memory at the worst moment of a compiled program, against hand counts and the compiler's own."""

import jax
import pytest

from mpjax.planner.compiled import _hlo
from mpjax.planner.compiled._hlo_memory import live_at_peak
from tests.planner.compiled.programs import STEPS, VERSIONS, kept

pytestmark = pytest.mark.optimised
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


def a_start(form):
  """A program that reduces and gathers asynchronously, in the forms of two releases."""
  big = "f32[128,32]{1,0}"
  reduced, gathered = {"plain": (X, f"({X}, {big})"), "nested": (f"(({X}), {X})", f"(({X}), {big})")}[form]
  over = ", output_to_operand_aliasing={{1}: (0, {})}" if form == "nested" else ""
  return [
    dot("a", "p", "p"),
    f"%rs = {reduced} all-reduce-start(%a), replica_groups={{}}, to_apply=%add{over}",
    f"%rd = {X} all-reduce-done(%rs)",
    f"%gs = {gathered} all-gather-start(%rd), replica_groups=mesh['data'=4] {{'data'}}",
    dot("b", "p", "p"),
    f"%gd = {big} all-gather-done(%gs)",
    "ROOT %r = f32[] custom-call(%gd, %b)",
  ]


@pytest.mark.parametrize("form", ["plain", "nested"])
def test_asynchronous_operation_takes_what_its_end_returns_and_keeps_its_operands_till_then(form):
  # The sum is in its operand's memory; the gathered array is beside it while it is made.
  assert live(*a_start(form)).nbytes == A + 4 * A + A


def test_state_of_a_loop_that_is_an_argument_takes_no_memory():
  found = live(
    "%n = s32[] constant(0)",
    f"%init = (s32[], {X}) tuple(%n, %p)",
    f"%w = (s32[], {X}) while(%init), condition=%condition, body=%body",
    f"%x = {X} get-tuple-element(%w), index=1",
    "ROOT %r = f32[] custom-call(%x)",
    computations=LOOP,
  )
  assert found.nbytes == found.inner.nbytes


def test_branches_of_a_predicate_are_found_by_their_older_names():
  found = live(
    f"%c = {X} conditional(%p, %p, %p), true_computation=%large, false_computation=%small",
    "ROOT %r = f32[] custom-call(%c)",
    computations=LOOP,
  )
  assert found.inner.nbytes == 2 * A


def test_small_values_leave_a_results_memory_to_large_ones():
  lines = [
    "%s = f32[] custom-call(%p)",
    dot("a", "p", "p"),
    dot("b", "a", "p"),
    "%t = f32[] custom-call(%s, %b)",
    f"ROOT %r = {X} broadcast(%t), dimensions={{}}",
  ]
  assert live(*lines).nbytes == A + 4 + 4


# Programs as compilers schedule them, beside the temporary memory that those say they take. The rest lies between
# buffers: each begins at a multiple of some bytes, and not every order of them can be packed.

ALONE = [(v, name, target) for v in VERSIONS for name, (_, all_of) in STEPS.items() for target in all_of]
SLACK = 512


@pytest.mark.parametrize(("version", "name", "target"), ALONE)
def test_worst_moment_takes_the_temporary_memory_of_the_compiler(version, name, target):
  program = kept(version, name, target)
  found = live_at_peak(_hlo.parse(program.text))
  if target.startswith("h200"):
    # The compiler says what is live, with results: of several a table, too.
    near = program.live - (program.outputs - program.aliases), program.live
    assert near[0] - SLACK <= found.nbytes <= near[1] + SLACK
  elif target == "here":
    assert 0.975 * program.temporaries - SLACK <= found.nbytes <= program.temporaries + SLACK
  else:  # these are small, and on the chip
    assert found.nbytes <= program.temporaries + 20_000
  inner = found.inner.nbytes if found.inner else 0
  assert sum(buffer.nbytes for buffer in found.buffers) + inner == found.nbytes


@pytest.mark.parametrize("name", ["step", "scan in half precision"])
def test_the_same_of_what_is_compiled_now(name):
  step = STEPS[name][0]()
  compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.args).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  assert live_at_peak(_hlo.parse(compiled.as_text())).nbytes == pytest.approx(temporaries, rel=0.02)


@pytest.mark.parametrize("version", VERSIONS)
def test_activations_are_among_what_is_live(version):
  found = live_at_peak(_hlo.parse(kept(version, "step").text))
  activations = [b for b in found.buffers if b.shape.dims == (2048, 256)]
  # Of each layer its result, and what the worst moment works on.
  assert 6 <= len(activations) <= 8
  assert all(buffer.readers for buffer in activations)
