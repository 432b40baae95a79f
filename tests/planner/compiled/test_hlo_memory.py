"""What is in memory at the worst moment of a compiled program, against hand counts and the compiler's own."""

import jax
import pytest

from mpjax.planner.compiled import parse
from mpjax.planner.compiled._hlo_memory import live_at_peak  # a plan shows its sum alone
from tests.planner.compiled._hlo_text import computation, program
from tests.planner.compiled.programs import KEPT, STEPS, VERSIONS, kept, parsed

pytestmark = pytest.mark.optimised
A = 32 * 32 * 4  # bytes of X


def live(lines, computations="", head=""):
  """The worst moment of a main computation of these lines, whose argument is `p`."""
  return live_at_peak(program(f"%p = X parameter(0); {lines}", computations, head))


def test_straight_programs():
  # What is left out is the result, whose memory is idle until it is written: a temporary may lie there.
  for what, lines, want in (
    ("nothing but the result", "ROOT a = p . p", 0),
    ("a value in the result's memory", "a = p . p; b = a . p; ROOT c = b . p", A),
    ("values that are read later", "a = p . p; b = a . p; c = a . b; ROOT d = a . c", 2 * A),
    (
      "a view, which keeps what it shows",
      "a = p . p; %v = f32[1024]{0} bitcast(%a); b = p . p; c = b . p; %w = X bitcast(%v); ROOT d = w . c",
      2 * A,
    ),
    ("a result with a large view of itself", "a = p . p; ROOT %r = (X, X) tuple(%a, %p)", 0),
    (
      "nothing on the chip",
      "%a = CHIP dot(%p, %p), DOT; %b = CHIP dot(%a, %p), DOT; ROOT c = a . b",
      0,
    ),
    (
      "what is copied from the chip, from the start of the copy on",
      "%a = CHIP dot(%p, %p), DOT; %s = (X, CHIP, u32[]{:S(2)}) copy-start(%a); b = p . p;"
      "%d = X copy-done(%s); c = b . d; ROOT e = c . d",
      2 * A,
    ),
    ("a constant", "%k = X constant({...}); ROOT a = k . p", 0),
    (
      "small values, which leave a result's memory to large ones",
      "%s = f32[] custom-call(%p); a = p . p; b = a . p; %t = f32[] custom-call(%s, %b);"
      "ROOT %r = X broadcast(%t), dimensions={}",
      A + 4 + 4,
    ),
  ):
    assert live(lines).nbytes == want, what


Q = "%q = X parameter(0)"
TWO = "%u = X transpose(%q), dimensions={1,0}; ROOT %both = (X, X) tuple(%t, %u)"
FUSED = (
  computation("%tanh", f"{Q}; ROOT %t = X tanh(%q)")
  + computation("%half", f"{Q}; %h = bf16[32,32]{{1,0}} convert(%q); ROOT %back = X convert(%h)")
  + computation("%turned", f"{Q}; ROOT %t = X transpose(%q), dimensions={{1,0}}")
  + computation("%two", f"{Q}; %t = X tanh(%q); {TWO}")
  + computation("%twice", f"{Q}; %t = X tanh(%q); %u = X multiply(%q, %t); ROOT %both = (X, X) tuple(%t, %u)")
)


def test_elementwise_result_is_written_over_what_dies_there():
  shared, apart = 3 * A, 4 * A
  of_two = "a = p . p; %t = (X, X) fusion(%a), kind=kLoop, calls=%NAME; %b = X get-tuple-element(%t), index=0"
  of_a_call = "%t = (X, f32[]) custom-call(%p); %a = X get-tuple-element(%t), index=0"
  for middle, want in (
    ("a = p . p; %b = X multiply(%a, %a)", shared),
    ("a = p . p; %b = X fusion(%a), kind=kLoop, calls=%tanh", shared),
    ("a = p . p; %b = X fusion(%a), kind=kLoop, calls=%half", shared),
    ("a = p . p; %b = X fusion(%a), kind=kLoop, calls=%turned", apart),
    ("a = p . p; b = a . p", apart),
    ("%b = X fusion(%p), kind=kLoop, calls=%tanh", shared),  # of an argument
    (of_two.replace("NAME", "twice"), shared + A),
    (of_two.replace("NAME", "two"), apart + A),
    (f"{of_a_call}; %b = X multiply(%a, %a)", apart),  # a part of a result
  ):
    found = live(f"k = p . p; j = k . p; {middle}; ROOT %r = f32[] custom-call(%b, %k, %j)", FUSED)
    assert found.nbytes == want, middle


def test_donated_argument_is_memory_for_temporaries_after_its_last_read():
  donated = ", input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={()->f32[]}"
  end = "%s = f32[2]{0} custom-call(%b); ROOT %r = X broadcast(%s), dimensions={}"
  early, late = f"a = p . p; b = a . a; {end}", f"a = p . p; b = a . p; {end}"
  # A result of its own has room for `a`; one in the argument's memory for `b`, or for neither.
  assert live(early).nbytes == live(late).nbytes == A + 8
  assert live(early, head=donated).nbytes == A
  assert live(late, head=donated).nbytes == 2 * A


def test_updates_in_place_take_no_memory_of_their_own():
  lines = (
    "%zero = BIG broadcast(%p), dimensions={}; %row = f32[1,1024]{1,0} reshape(%p);"
    "%one = BIG dynamic-update-slice(%zero, %row, %p, %p);"
    "%two = BIG dynamic-update-slice(%one, %row, %p, %p);"
    "%three = BIG scatter(%two, %p, %row), to_apply=%add; ROOT %sum = X custom-call(%three)"
  )
  assert live(lines).nbytes == 64 * 1024 * 4  # the row is in the result's memory


def test_a_gather_by_a_tpus_sparse_core_reads_from_its_update_on_and_makes_its_result():
  kind = "((X), BIG, (s32[2]{0}, s32[0]{0}))"
  aliased = "output_to_operand_aliasing={{2,0}: (0, {2,0}), {2,1}: (0, {2,1})}"
  lines = (
    "a = p . p; %s = ((), (), (s32[2]{0}, s32[0]{0})) custom-call-start(), called_computations={%c};"
    f"%u = {kind} custom-call-update(%s, %a), {aliased}; b = p . p; %d = BIG custom-call-done(%u);"
    "ROOT %r = f32[] custom-call(%d, %b)"
  )
  assert live(lines).nbytes == 64 * 1024 * 4 + 2 * A


def test_call_that_writes_over_its_operand():
  call = "a = p . p; b = a . p; %t = (X, s8[100]{0}) custom-call(%a, %b)"
  end = "%c = X get-tuple-element(%t), index=0; ROOT %d = f32[] custom-call(%c, %a)"
  assert live(f"{call}, output_to_operand_aliasing={{{{0}}: (1, {{}})}}; {end}").nbytes == 2 * A + 100
  assert live(f"{call}; {end}").nbytes == 3 * A + 100


BODY = "%s = (s32[], X) parameter(0); %i = s32[] get-tuple-element(%s), index=0; %x = X get-tuple-element(%s), index=1"
NEXT = "%n = s32[] custom-call(%i); ROOT %t = (s32[], X) tuple(%n, %c)"
LOOP = (
  computation("%body", f"{BODY}; a = x . x; b = a . x; c = a . b; {NEXT}")
  + computation("%condition", "%s = (s32[], X) parameter(0); ROOT %less = pred[] custom-call(%s)")
  + computation("%small", f"{Q}; ROOT a = q . q")
  + computation("%large", f"{Q}; a = q . q; b = a . q; c = a . b; ROOT d = c . b")
)
RUN = "%w = (s32[], X) while(%init), condition=%condition, body=%body; %x = X get-tuple-element(%w), index=1"


def test_loop_has_its_state_once_and_its_bodys_temporaries():
  start = (
    "k = p . p; %first = X multiply(%p, %p); %n = s32[] constant(0); %init = (s32[], X) tuple(%n, %first)"
  )
  found = live(f"{start}; {RUN}; ROOT %r = f32[] custom-call(%x, %k)", LOOP)
  # The body's result is written where the state was.
  assert (found.at.name, found.inner.nbytes) == ("w", 2 * A)
  assert found.nbytes == pytest.approx(4 * A, abs=8)  # and the number of the round
  start = "%n = s32[] constant(0); %init = (s32[], X) tuple(%n, %p)"
  found = live(f"{start}; {RUN}; ROOT %r = f32[] custom-call(%x)", LOOP)
  assert found.nbytes == found.inner.nbytes  # a state that is an argument


def test_conditional_has_its_largest_branch():
  call = "%c = X conditional(%p, %k, %k), branch_computations={%small, %large}"
  found = live(f"k = p . p; {call}; ROOT %r = f32[] custom-call(%c, %k)", LOOP)
  assert (found.at.name, found.inner.nbytes, found.nbytes) == ("c", 2 * A, 4 * A)
  # By the names that the branches of a predicate had.
  call = "%c = X conditional(%p, %p, %p), true_computation=%large, false_computation=%small"
  assert live(f"{call}; ROOT %r = f32[] custom-call(%c)", LOOP).inner.nbytes == 2 * A


def test_asynchronous_operation_takes_what_its_end_returns_and_keeps_its_operands_till_then():
  plain, nested = (
    ("X", "(X, FOUR)", ""),
    ("((X), X)", "((X), FOUR)", ", output_to_operand_aliasing={{1}: (0, {})}"),
  )
  for reduced, gathered, over in (plain, nested):  # the forms of two releases
    lines = (
      f"a = p . p; %rs = {reduced} all-reduce-start(%a), replica_groups={{}}, to_apply=%add{over};"
      f"%rd = X all-reduce-done(%rs);"
      f"%gs = {gathered} all-gather-start(%rd), replica_groups=mesh['data'=4] {{'data'}};"
      f"b = p . p; %gd = FOUR all-gather-done(%gs); ROOT %r = f32[] custom-call(%gd, %b)"
    )
    # The sum is in its operand's memory; the gathered array is beside it while it is made.
    assert live(lines).nbytes == A + 4 * A + A, reduced


def test_worst_moment_takes_the_temporary_memory_of_the_compiler():
  """Of what is kept. The rest lies between buffers: each begins at a multiple of some bytes, and not all can be packed."""
  slack = 512
  for version, name, target in KEPT:
    made, found = kept(version, name, target), live_at_peak(parsed(version, name, target))
    if target.startswith("h200"):
      # The compiler says what is live, with results: of several a table, too.
      least, most = made.live - (made.outputs - made.aliases), made.live
    elif target == "here":
      least, most = 0.975 * made.temporaries, made.temporaries
    else:  # these are small, and on the chip
      least, most = 0, made.temporaries + 20_000
    assert least - slack <= found.nbytes <= most + slack, (version, name, target)
    inner = found.inner.nbytes if found.inner else 0
    assert sum(buffer.nbytes for buffer in found.buffers) + inner == found.nbytes, (version, name, target)


@pytest.mark.parametrize("name", ["step", "scan in half precision"])
def test_the_same_of_what_is_compiled_now(name):
  step = STEPS[name][0]()
  compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.args).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  assert live_at_peak(parse(compiled.as_text())).nbytes == pytest.approx(temporaries, rel=0.02)


def test_activations_are_among_what_is_live():
  for version in VERSIONS:
    activations = [b for b in live_at_peak(parsed(version, "step")).buffers if b.shape.dims == (2048, 256)]
    # Of each layer its result, and what the worst moment works on.
    assert 6 <= len(activations) <= 8, version
    assert all(buffer.readers for buffer in activations), version
