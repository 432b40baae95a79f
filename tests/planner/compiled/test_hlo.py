"""What is read from the text of compiled programs: instructions, sizes, aliases, lines, loops, names."""

import pytest

from mpjax.jaxpr import BACKWARD, FORWARD
from mpjax.planner.compiled import _hlo_parts, collectives, parse  # a plan shows few of the names
from tests.planner.compiled._hlo_text import computation, program

# A loop of five steps in a program with aliases, tiles, a tuple and the tables of its lines.
MODULE = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (0, {}, must-alias) }, \
entry_computation_layout={(f32[100,260]{0,1:T(8,128)}, s32[]{:T(128)}, bf16[7,129]{1,0:T(8,128)(2,1)})->f32[]}

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.11/site-packages/optax/_src/base.py"

FunctionNames
1 "step"
2 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=29 end_line=29 column=2 end_column=57}
2 {file_name_id=2 function_name_id=2 line=7 end_line=8 column=2 end_column=9}
3 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}


%body (state.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %x.1 = f32[8]{0:T(128)} get-tuple-element(%state.1), index=1
  %tanh.3 = f32[8]{0:T(128)} tanh(%x.1), metadata={op_name="jit(step)/jvp(GPT)/h0/tanh" stack_frame_id=3}
  ROOT %tuple.1 = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%i.1, %tanh.3)
}

%condition (state.2: (s32[], f32[8])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} custom-call(%state.2), custom_call_target="less"
}

ENTRY %main.7 (w.1: f32[100,260], n.1: s32[], h.1: bf16[7,129]) -> (f32[8], f32[]) {
  %n.1 = s32[]{:T(128)} parameter(1), metadata={op_name="n"}
  %w.1 = f32[100,260]{0,1:T(8,128)} parameter(0), metadata={op_name="w"}
  %h.1 = bf16[7,129]{1,0:T(8,128)(2,1)} parameter(2)
  %copy-start = (f32[100,260]{0,1:T(8,128)S(1)}, f32[100,260]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%w.1)
  %copy-done = f32[100,260]{0,1:T(8,128)S(1)} copy-done(%copy-start)
  %first.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) fusion(%n.1, %copy-done), kind=kLoop, calls=%not_here
  %loop.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%first.2), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"},"x":{"y":")"}}
  %last = f32[8]{0:T(128)} get-tuple-element(%loop.1), index=1
  %sum = f32[]{:T(128)} custom-call(%last), custom_call_target="sum", called_computations={%condition, %body}
  ROOT %out = (f32[8]{0:T(128)}, f32[]{:T(128)}) tuple(%last, %sum)
}
"""


@pytest.fixture(scope="module")
def module():
  return parse(MODULE)


def test_computations_arguments_and_results_are_in_their_order(module):
  assert list(module.computations) == ["body", "condition", "main.7"]
  assert module.entry == "main.7"
  assert list(module.computations["body"]) == ["state.1", "i.1", "x.1", "tanh.3", "tuple.1"]
  assert [i.name for i in module.computations["body"].values() if i.is_root] == ["tuple.1"]
  named = lambda shapes: [(s.dtype, s.dims) for s in shapes]
  assert named(module.parameters()) == [("f32", (100, 260)), ("s32", ()), ("bf16", (7, 129))]
  assert named(module.results()) == [("f32", (8,)), ("f32", ())]


def test_aliases_are_from_results_to_arguments(module):
  assert module.aliases == {0: 2, 1: 0}
  body = "ENTRY %e (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
  layout = "entry_computation_layout={(f32[2]{0})->f32[2]{0}}"
  alone = f"HloModule m, input_output_alias={{ {{}}: (3, {{}}, may-alias) }}, {layout}\n{body}"
  assert parse(alone).aliases == {0: 3}
  assert parse(f"HloModule m, {layout}\n{body}").aliases == {}


def test_instruction_knows_what_it_reads_and_runs(module):
  for inside, name, operands, called, times in (
    ("main.7", "copy-start", ["w.1"], [], 1),
    ("main.7", "first.2", ["n.1", "copy-done"], ["not_here"], 1),
    ("main.7", "loop.1", ["first.2"], ["condition", "body"], 5),
    ("main.7", "sum", ["last"], ["condition", "body"], 1),
    ("body", "tuple.1", ["i.1", "tanh.3"], [], 1),
  ):
    found = module.computations[inside][name]
    assert (found.operands, found.called, found.trip_count) == (operands, called, times), name


def test_loops_repeat_what_they_run(module):
  found = [(name, times, [c.name for c in callers]) for name, times, callers in module.repetitions()]
  looped, once = [("condition", 5, ["loop.1"]), ("body", 5, ["loop.1"])], [("condition", 1, ["sum"])]
  assert found == [("main.7", 1, []), *looped, *once, ("body", 1, ["sum"])]


def test_asynchronous_copy_has_the_copy_its_source_and_a_counter(module):
  shapes = module.computations["main.7"]["copy-start"].shapes
  assert [(s.dtype, s.space) for s in shapes] == [("f32", 1), ("f32", 0), ("u32", 2)]
  assert [s.nbytes for s in shapes] == [264 * 128 * 4, 264 * 128 * 4, 4]


def test_frames_lead_from_a_line_to_its_callers_and_the_source_is_the_users(module):
  optax, mine = ("/venv/lib/python3.11/site-packages/optax/_src/base.py", 7), "/home/me/train.py"
  assert module.lines == {1: [(mine, 29)], 2: [(mine, 12), (mine, 29)], 3: [optax, (mine, 12), (mine, 29)]}
  assert _hlo_parts.source_of(module, module.computations["body"]["tanh.3"]) == "train.py:12"
  assert _hlo_parts.source_of(module, module.computations["main.7"]["sum"]) == ""


def test_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match=r"no ENTRY computation: expected the text of an HLO module"):
    parse("HloModule nothing\n")


def shapes(text):
  """The arrays of an instruction of this type."""
  return [(s.dtype, s.dims, s.nbytes, s.space) for s in program(f"ROOT %x = {text} custom-call()").results()]


def test_types_of_instructions():
  nested = "(f32[2]{0}, /*index=1*/(s8[3]{0}, token[]), pred[])"
  for text, want in {
    "f32[]": [("f32", (), 4, 0)],
    "f32[3,5]{1,0}": [("f32", (3, 5), 60, 0)],
    "bf16[0,5]{1,0}": [("bf16", (0, 5), 0, 0)],
    "f32[64,100]{1,0:T(8,128)S(1)}": [("f32", (64, 100), 64 * 128 * 4, 1)],
    nested: [("f32", (2,), 8, 0), ("s8", (3,), 3, 0), ("pred", (), 1, 0)],
    "token[]": [],
    "()": [],
  }.items():
    assert shapes(text) == want, text


BITS = {"f32": 32, "bf16": 16, "f16": 16, "f64": 64, "pred": 8, "s8": 8, "u4": 4, "s4": 4, "s2": 2, "c64": 64}
BITS |= {"f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8, "f4e2m1fn": 4}


def test_bytes_of_a_type_are_of_whole_tiles_and_elements_below_a_byte_are_packed():
  for dtype, bits in BITS.items():
    assert shapes(f"{dtype}[16]{{0}}")[0][2] == 2 * bits, dtype
  # dtype, dimensions, layout, elements with padding
  for dtype, dims, layout, elements in (
    ("f32", "100,260", "1,0", 100 * 260),
    ("f32", "100,260", "1,0:T(8,128)", 104 * 384),
    ("f32", "100,260", "0,1:T(8,128)", 264 * 128),
    ("f32", "260,3", "0,1:T(4,128)", 4 * 384),
    ("bf16", "7,129", "1,0:T(8,128)(2,1)", 8 * 256),
    ("f8e4m3fn", "7,129", "1,0:T(8,128)(4,1)S(1)", 8 * 256),
    ("f32", "2,3,5", "1,2,0:T(8,128)", 2 * 8 * 128),
    ("f32", "2,9,130", "2,1,0:T(8,128)", 2 * 16 * 256),
    ("f32", "260", "0:T(512)", 512),
    ("f32", "", ":T(128)", 128),
    ("s32", "6", "0:T(8,128)", 8 * 128),
    ("f32", "0,3", "1,0:T(8,128)", 0),
    ("s4", "3", "0", 4),
    ("u4", "10,100", "1,0:T(8,128)", 16 * 128),
  ):
    bits = BITS.get(dtype, 32)
    assert shapes(f"{dtype}[{dims}]{{{layout}}}")[0][2] == elements * bits // 8, (dtype, dims, layout)


NAMES = [
  # name, modules, phase, operation
  ("jit(step)/jvp(GPT)/blocks/5/down/dot_general", "GPT/blocks/5/down", FORWARD, "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general", "GPT/blocks/5/down", BACKWARD, "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/h0/checkpoint/rematted_computation/tanh", "GPT/h0", BACKWARD, "tanh"),
  ("jit(step)/jvp(GPT)/h0/BTNH,BSNH->BNTS/dot_general", "GPT/h0", FORWARD, "dot_general"),
  ("jit(step)/jvp()/while/body/closed_call/mul", "", FORWARD, "mul"),
  ("jit(step)/jvp(vmap(Net))/fc/pjit(relu)/max", "Net/fc", FORWARD, "max"),
  ("jit(call)/call_exported/jit(flat)/jit(_step)/optimizer/add", "optimizer", "", "add"),
  ("jit(step)/jit(f)(a/b)/add", "", "", "add"),
  ("", "", "", ""),
]


def test_what_a_name_says():
  for name, *want in NAMES:
    told = (_hlo_parts.path_of_name, _hlo_parts.phase_of_name, _hlo_parts.operation_of)
    assert [of(name) for of in told] == want, name
  line = '  ROOT %x = f32[2]{0} parameter(0), metadata={op_name="jit(f)/A/mul;jit(f)/B/add"}'
  joined = parse(f"ENTRY %e () -> () {{\n{line}\n}}\n")  # by the compiler
  assert joined.computations["e"]["x"].op_name == "jit(f)/A/mul"


# How often loops run, where nothing but their instructions says so: as a TPU's compiler writes `lax.scan`, with
# copies of counters.
STATE = (
  "%s = (V, N) parameter(0); %x = V get-tuple-element(%s), index=0; %i = N get-tuple-element(%s), index=1"
)
ADD = "%step = N constant(STEP); %copy.1 = N copy(%i); %next = N UPDATE(%copy.1, %step)"
SUM = (
  "%sum = V all-reduce(%x), replica_groups={{0,1}}, to_apply=%none; ROOT %tuple.1 = (V, N) tuple(%sum, %next)"
)
TEST = (
  '%last = N constant(LAST), metadata={op_name="last"}; ROOT %less = pred[] compare(%i, %last), direction=LT'
)
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
    ({"STEP": -1}, 1),
    ({"UPDATE": "multiply"}, 1),
    ({"direction=LT": "direction=GT"}, 1),
    ({"constant(LAST)": "custom-call()"}, 1),
  ):
    texts = [f"{STATE}; {ADD}; {SUM}", f"{STATE}; {TEST}", f"{START}; {LOOP}"]
    for name, value in (changes | {name: n for name, n in usual.items() if name not in changes}).items():
      texts = [text.replace(name, str(value)) for text in texts]
    module = program(texts[2], computation("%body", texts[0]) + computation("%test", texts[1]))
    assert {name: n for name, n, _ in module.repetitions()}["body"] == runs, changes
    assert bool(module.loops_of_unknown_length()) == (runs == 1), changes
    (found,) = collectives(module)
    assert (found.nbytes, found.count) == (runs * 128 * 4, runs), changes  # a tile for V


def test_what_moves_while_fusions_compute_counts_once():
  gather = '%g = f32[64]{0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="7"}'
  names = ("begin", "between", "end")
  parts = "".join(computation(f"%{name}", f"%p = V parameter(0); ROOT {gather}") for name in names)
  calls = [f"%f.{name} = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%{name}" for name in names]
  (found,) = collectives(program("; ".join(["%x = V parameter(0)", *calls]), parts))
  assert (found.operation, found.nbytes, found.count) == ("all-gather", 64 * 4, 1)
