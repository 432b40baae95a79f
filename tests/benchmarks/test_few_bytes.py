"""What a compiled update moves through a device's main memory."""

from benchmarks.few_bytes import main_memory_bytes
from tests.planner.compiled._hlo_text import computation, serialised


def moved(lines):
  main = computation("ENTRY %main", f"%p0 = f32[8,4]{{1,0}} parameter(0); {lines}")
  return main_memory_bytes(serialised(f"HloModule m, is_scheduled=true\n\n{main}"))


def test_what_is_on_the_chip_is_read_once():
  a_slice = "((f32[8,4]{1,0}), f32[2,4]{1,0:S(1)}, s32[]{:S(2)})"
  lines = (
    f"%start = {a_slice} slice-start(%p0), slice={{[0:2], [0:4]}}; %on = f32[2,4]{{1,0:S(1)}} slice-done(%start);"
    "%both = (f32[8,4]{1,0:S(1)}, s8[8,4]{1,0}) custom-call(%on);"
    "%first = f32[8,4]{1,0:S(1)} get-tuple-element(%both), index=0;"
    "%copy = (f32[8,4]{1,0}, f32[8,4]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%first);"
    "ROOT %out = f32[8,4]{1,0} copy-done(%copy)"
  )
  read, codes, out = 32, 32, 128
  assert moved(lines) == read + codes + out
