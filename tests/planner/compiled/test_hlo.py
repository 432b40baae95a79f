"""What is read from the text of compiled programs: instructions, sizes, aliases, lines, names."""

import jax.numpy as jnp
import pytest

from mpjax.planner.compiled import _hlo, _hlo_locations

HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}\n"

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
  return _hlo.parse(MODULE)


def test_computations_are_in_order_and_know_their_entry(module):
  assert list(module.computations) == ["body", "condition", "main.7"]
  assert module.entry == "main.7"
  assert list(module.computations["body"]) == ["state.1", "i.1", "x.1", "tanh.3", "tuple.1"]
  assert [i.name for i in module.computations["body"].values() if i.is_root] == ["tuple.1"]


def test_arguments_and_results_are_in_the_order_of_the_call(module):
  assert [(s.dtype, s.dims) for s in module.parameters()] == [
    ("f32", (100, 260)),
    ("s32", ()),
    ("bf16", (7, 129)),
  ]
  assert [(s.dtype, s.dims) for s in module.results()] == [("f32", (8,)), ("f32", ())]


def test_aliases_are_from_results_to_arguments(module):
  assert module.aliases == {0: 2, 1: 0}


def test_aliases_of_a_single_result_and_of_none():
  body = "ENTRY %e (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
  layout = "entry_computation_layout={(f32[2]{0})->f32[2]{0}}"
  alone = f"HloModule m, input_output_alias={{ {{}}: (3, {{}}, may-alias) }}, {layout}\n{body}"
  assert _hlo.parse(alone).aliases == {0: 3}
  assert _hlo.parse(f"HloModule m, {layout}\n{body}").aliases == {}


@pytest.mark.parametrize(
  ("computation", "name", "operands", "called", "times"),
  [
    ("main.7", "copy-start", ["w.1"], [], 1),
    ("main.7", "first.2", ["n.1", "copy-done"], ["not_here"], 1),
    ("main.7", "loop.1", ["first.2"], ["condition", "body"], 5),
    ("main.7", "sum", ["last"], ["condition", "body"], 1),
    ("body", "tuple.1", ["i.1", "tanh.3"], [], 1),
  ],
)
def test_instruction_knows_what_it_reads_and_runs(module, computation, name, operands, called, times):
  instruction = module.computations[computation][name]
  assert instruction.operands == operands
  assert instruction.called == called
  assert instruction.trip_count == times


def test_loops_repeat_what_they_run(module):
  found = [(name, times, [c.name for c in callers]) for name, times, callers in module.repetitions()]
  assert found == [
    ("main.7", 1, []),
    ("condition", 5, ["loop.1"]),
    ("body", 5, ["loop.1"]),
    ("condition", 1, ["sum"]),
    ("body", 1, ["sum"]),
  ]


def test_asynchronous_copy_has_the_copy_its_source_and_a_counter(module):
  shapes = module.computations["main.7"]["copy-start"].shapes
  assert [(s.dtype, s.space) for s in shapes] == [("f32", 1), ("f32", 0), ("u32", 2)]
  assert [s.nbytes for s in shapes] == [264 * 128 * 4, 264 * 128 * 4, 4]


def test_frames_lead_from_a_line_to_its_callers(module):
  optax = "/venv/lib/python3.11/site-packages/optax/_src/base.py"
  assert module.lines == {
    1: [("/home/me/train.py", 29)],
    2: [("/home/me/train.py", 12), ("/home/me/train.py", 29)],
    3: [(optax, 7), ("/home/me/train.py", 12), ("/home/me/train.py", 29)],
  }


def test_source_is_the_users_line_not_the_librarys(module):
  tanh = module.computations["body"]["tanh.3"]
  assert _hlo_locations.source_of(module, tanh) == "train.py:12"
  assert _hlo_locations.source_of(module, module.computations["main.7"]["sum"]) == ""


def test_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match=r"no ENTRY computation: expected the text of an HLO module"):
    _hlo.parse("HloModule nothing\n")


@pytest.mark.parametrize(
  ("text", "want"),
  [
    ("f32[]", [("f32", (), 4, 0)]),
    ("f32[3,5]{1,0}", [("f32", (3, 5), 60, 0)]),
    ("bf16[0,5]{1,0}", [("bf16", (0, 5), 0, 0)]),
    ("f32[64,100]{1,0:T(8,128)S(1)}", [("f32", (64, 100), 64 * 128 * 4, 1)]),
    (
      "(f32[2]{0}, /*index=1*/(s8[3]{0}, token[]), pred[])",
      [("f32", (2,), 8, 0), ("s8", (3,), 3, 0), ("pred", (), 1, 0)],
    ),
    ("token[]", []),
    ("()", []),
  ],
)
def test_shapes(text, want):
  assert [(s.dtype, s.dims, s.nbytes, s.space) for s in _hlo.shapes(text)] == want


@pytest.mark.parametrize(
  ("dtype", "bits"),
  [
    *(("f32", 32), ("bf16", 16), ("f16", 16), ("f64", 64), ("pred", 8), ("s8", 8), ("u4", 4), ("s2", 2)),
    *(("f8e4m3fn", 8), ("f8e5m2", 8), ("f8e8m0fnu", 8), ("f4e2m1fn", 4), ("c64", 64), ("token", 0)),
  ],
)
def test_bits_of_an_element(dtype, bits):
  assert _hlo.bits(dtype) == bits


@pytest.mark.parametrize(
  ("dtype", "dims", "layout", "elements"),
  [
    ("f32", (100, 260), "1,0", 100 * 260),
    ("f32", (100, 260), "1,0:T(8,128)", 104 * 384),
    ("f32", (100, 260), "0,1:T(8,128)", 264 * 128),
    ("f32", (260, 3), "0,1:T(4,128)", 4 * 384),
    ("bf16", (7, 129), "1,0:T(8,128)(2,1)", 8 * 256),
    ("f8e4m3fn", (7, 129), "1,0:T(8,128)(4,1)S(1)", 8 * 256),
    ("f32", (2, 3, 5), "1,2,0:T(8,128)", 2 * 8 * 128),
    ("f32", (2, 9, 130), "2,1,0:T(8,128)", 2 * 16 * 256),
    ("f32", (260,), "0:T(512)", 512),
    ("f32", (), ":T(128)", 128),
    ("s32", (6,), "0:T(8,128)", 8 * 128),
    ("f32", (0, 3), "1,0:T(8,128)", 0),
  ],
)
def test_padded_bytes(dtype, dims, layout, elements):
  assert _hlo.padded_bytes(dtype, dims, layout) == elements * _hlo.bits(dtype) // 8


@pytest.mark.parametrize(
  ("dtype", "name"),
  [
    *(("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("s32", "int32"), ("u8", "uint8")),
    *(("pred", "bool"), ("c64", "complex64"), ("f8e4m3fn", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2")),
    *(("f8e8m0fnu", "float8_e8m0fnu"), ("f4e2m1fn", "float4_e2m1fn"), ("s4", "int4")),
  ],
)
def test_name_of_a_dtype_is_numpys(dtype, name):
  assert _hlo.numpy_name(dtype) == name
  assert jnp.dtype(name).name == name


def test_elements_below_a_byte_are_packed():
  assert _hlo.padded_bytes("s4", (3,), "0") == 2
  assert _hlo.padded_bytes("u4", (10, 100), "1,0:T(8,128)") == 16 * 128 // 2


NAMES = [
  # name, modules, phase, operation
  ("jit(step)/jvp(GPT)/blocks/5/down/dot_general", "GPT/blocks/5/down", "forward", "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general", "GPT/blocks/5/down", "backward", "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/h0/checkpoint/rematted_computation/tanh", "GPT/h0", "backward", "tanh"),
  ("jit(step)/jvp(GPT)/h0/BTNH,BSNH->BNTS/dot_general", "GPT/h0", "forward", "dot_general"),
  ("jit(step)/jvp()/while/body/closed_call/mul", "", "forward", "mul"),
  ("jit(step)/jvp(vmap(Net))/fc/pjit(relu)/max", "Net/fc", "forward", "max"),
  ("jit(call)/call_exported/jit(flat)/jit(_step)/optimizer/add", "optimizer", "", "add"),
  ("jit(step)/jit(f)(a/b)/add", "", "", "add"),
  ("", "", "", ""),
]


@pytest.mark.parametrize(("name", "modules", "phase", "operation"), NAMES)
def test_what_a_name_says(name, modules, phase, operation):
  assert _hlo_locations.path_of_name(name) == modules
  assert _hlo_locations.phase_of_name(name) == phase
  assert _hlo_locations.operation_of(name) == operation


def test_names_that_the_compiler_joined_count_as_the_first():
  line = '  ROOT %x = f32[2]{0} parameter(0), metadata={op_name="jit(f)/A/mul;jit(f)/B/add"}'
  parsed = _hlo.parse(f"{HEAD}ENTRY %e (x: f32[2]) -> f32[2] {{\n{line}\n}}\n")
  assert parsed.computations["e"]["x"].op_name == "jit(f)/A/mul"
