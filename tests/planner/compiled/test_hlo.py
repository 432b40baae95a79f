"""What is read of compiled programs: instructions, sizes, aliases, lines, loops, names."""

from mpjax.planner._program import collectives_of
from mpjax.planner.compiled._from_hlo import from_hlo
from mpjax.planner.compiled._hlo import parse, path_of_name, trips
from tests.planner.compiled._hlo_text import computation, program, serialised


def shapes(text):
  """The arrays of an instruction of this type."""
  found = program(f"ROOT %x = {text} custom-call()").root.shapes
  return [(s.dtype, s.dims, s.nbytes, s.space) for s in found]


def test_bytes_of_a_type_are_of_whole_tiles_and_elements_below_a_byte_are_packed():
  for text, nbytes in (
    ("f32[100,260]{1,0}", 4 * 100 * 260),
    ("f32[100,260]{0,1:T(8,128)}", 4 * 264 * 128),
    ("f32[260,3]{0,1:T(4,128)}", 4 * 4 * 384),
    ("bf16[7,129]{1,0:T(8,128)(2,1)}", 2 * 8 * 256),
    ("f8e4m3fn[7,129]{1,0:T(8,128)(4,1)S(1)}", 8 * 256),
    ("f32[2,3,5]{1,2,0:T(8,128)}", 4 * 2 * 8 * 128),
    ("f32[260]{0:T(512)}", 4 * 512),
    ("f32[]{:T(128)}", 4 * 128),
    ("s32[6]{0:T(8,128)}", 4 * 8 * 128),
    ("f32[0,3]{1,0:T(8,128)}", 0),
    ("u4[10,100]{1,0:T(8,128)}", 16 * 128 // 2),
    ("pred[16]{0}", 16),
    ("c64[16]{0}", 128),
  ):
    assert shapes(text)[0][2] == nbytes, text


def test_what_a_name_says():
  for name, modules in (
    ("jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general", "GPT/blocks/5/down"),
    ("jit(step)/jvp()/while/body/closed_call/mul", ""),
    ("jit(call)/call_exported/jit(flat)/jit(_step)/optimizer/add", "optimizer"),
    ("", ""),
  ):
    assert path_of_name(name) == modules, name
  joined = 'ROOT %x = V parameter(0), metadata={op_name="jit(f)/A/mul;jit(f)/B/add"}'.replace(";", "SEMI")
  module = parse(
    serialised(f"HloModule m\n\n{computation('ENTRY %main', joined)}".replace("SEMI", ";"))
  )  # by the compiler
  assert module.root.op_name == "jit(f)/A/mul"


# How often loops run, where nothing but their instructions says so: as a TPU's compiler writes `lax.scan`, with
# copies of counters.
STATE = (
  "%s = (V, N) parameter(0); %x = V get-tuple-element(%s), index=0; %i = N get-tuple-element(%s), index=1"
)
COUNT = "%step = N constant(STEP); %copy.1 = N copy(%i); %next = N UPDATE(%copy.1, %step)"
SUM = (
  "%sum = V all-reduce(%x), replica_groups={{0,1}}, to_apply=%add; ROOT %tuple.1 = (V, N) tuple(%sum, %next)"
)
TEST = "%last = N constant(LAST); ROOT %less = pred[] compare(%i, %last), direction=LT"
START = "%p = V parameter(0); %first = N constant(FIRST); %copy.0 = N copy(%first); %start = (V, N) tuple(%p, %copy.0)"
LOOP = (
  "%loop = (V, N) while(%start), condition=%test, body=%body; ROOT %out = V get-tuple-element(%loop), index=0"
)


def test_a_counter_says_how_often_its_loop_runs_and_what_cannot_be_told_counts_once():
  usual = {"FIRST": 0, "LAST": 4, "STEP": 1, "UPDATE": "add"}
  for changes, runs in (
    ({}, 4),
    ({"FIRST": 1}, 3),
    ({"STEP": 2, "LAST": 5}, 3),
    ({"STEP": -1}, None),
    ({"UPDATE": "multiply"}, None),
    ({"direction=LT": "direction=GT"}, None),
    ({"constant(LAST)": "custom-call()"}, None),
  ):
    texts = [f"{STATE}; {COUNT}; {SUM}", f"{STATE}; {TEST}", f"{START}; {LOOP}"]
    for name, value in (changes | {name: n for name, n in usual.items() if name not in changes}).items():
      texts = [text.replace(name, str(value)) for text in texts]
    module = program(texts[2], computation("%body", texts[0]) + computation("%test", texts[1]))
    (loop,) = (i for i in module.instructions if i.op == "while")
    assert trips(loop) == runs, changes
    (found,) = collectives_of(from_hlo(module))
    assert (found.nbytes, found.count) == ((runs or 1) * 128 * 4, runs or 1), changes  # a tile for V


def test_what_moves_while_fusions_compute_counts_once():
  gather = '%g = f32[64]{0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="7"}'
  chained = ("begin", "between", "end")
  begins = '%s = s32[] custom-call(%p), custom_call_target="AsyncCollectiveStart"; '
  parts = "".join(
    computation(f"%{name}", f"%p = V parameter(0); {begins * (name == 'begin')}ROOT {gather}")
    for name in chained
  )
  calls = [f"%f.{name} = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%{name}" for name in chained]
  (found,) = collectives_of(from_hlo(program("; ".join(["%x = V parameter(0)", *calls]), parts)))
  assert (found.operation, found.nbytes, found.count) == ("all-gather", 64 * 4, 1)
