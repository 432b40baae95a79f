"""How often loops of compiled programs run, where nothing but their instructions says so."""

import pytest

from mpjax.planner.compiled import _hlo, _hlo_products

TILE = 128 * 4  # bytes that f32[8] takes
# As a TPU's compiler writes `lax.scan`: copies of counters, and no number of runs.
PROGRAM = """HloModule a_scan, is_scheduled=true

%body (state.1: (f32[8], s32[])) -> (f32[8], s32[]) {
  %state.1 = (f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %step = s32[]{:T(128)} constant(STEP)
  %x = f32[8]{0:T(128)} get-tuple-element(%state.1), index=0
  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=1
  %copy.1 = s32[]{:T(128)} copy(%i)
  %sum = f32[8]{0:T(128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%none
  %next = s32[]{:T(128)} UPDATE(%copy.1, %step)
  ROOT %tuple.1 = (f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%sum, %next)
}

%condition (state.2: (f32[8], s32[])) -> pred[] {
  %state.2 = (f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %last = s32[]{:T(128)} constant(LAST), metadata={op_name="last"}
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=1
  ROOT %less = pred[]{:T(512)} compare(%i.2, %last), direction=LT
}

ENTRY %main (x.0: f32[8]) -> f32[8] {
  %x.0 = f32[8]{0:T(128)} parameter(0)
  %first = s32[]{:T(128)} constant(FIRST)
  %copy.0 = s32[]{:T(128)} copy(%first)
  %start = (f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%x.0, %copy.0)
  %loop = (f32[8]{0:T(128)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%loop), index=0
}
"""


def program(**changes):
  text = PROGRAM
  usual = {"FIRST": 0, "LAST": 4, "STEP": 1, "UPDATE": "add"}
  for name, value in (changes | {name: n for name, n in usual.items() if name not in changes}).items():
    text = text.replace(name, str(value))
  return _hlo.parse(text)


@pytest.mark.parametrize(
  ("changes", "runs"),
  [
    ({}, 4),
    ({"FIRST": 1}, 3),
    ({"STEP": 2, "LAST": 5}, 3),
    # What cannot be told counts once.
    ({"STEP": -1}, 1),
    ({"UPDATE": "multiply"}, 1),
    ({"direction=LT": "direction=GT"}, 1),
    ({"constant(LAST)": "custom-call()"}, 1),
  ],
)
def test_a_counter_says_how_often_its_loop_runs(changes, runs):
  module = program(**changes)
  times = {name: n for name, n, _ in module.repetitions()}
  assert times["body"] == runs
  assert bool(module.loops_of_unknown_length()) == (runs == 1)
  (found,) = _hlo_products.collectives(module)
  assert (found.nbytes, found.count) == (runs * TILE, runs)


def test_what_moves_while_fusions_compute_counts_once():
  gather = '%g = f32[64]{0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="7"}'
  part = f"%NAME (p: f32[8]) -> f32[64] {{\n  %p = f32[8]{{0}} parameter(0)\n  ROOT {gather}\n}}\n"
  fused = "%f.NAME = f32[64]{0} fusion(%x), kind=kCustom, calls=%NAME"
  names = ("begin", "between", "end")
  parts = "".join(part.replace("NAME", name) for name in names)
  calls = "\n".join(f"  {fused.replace('NAME', name)}" for name in names)
  text = f"{parts}ENTRY %main (x: f32[8]) -> f32[64] {{\n  %x = f32[8]{{0}} parameter(0)\n{calls}\n}}\n"
  (found,) = _hlo_products.collectives(_hlo.parse(text))
  assert (found.operation, found.nbytes, found.count) == ("all-gather", 64 * 4, 1)
