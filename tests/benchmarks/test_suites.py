"""Suites that need a device or its compiler, as far as they go without."""

import jax
import pytest

from benchmarks.few_bytes import _memory as few_bytes
from benchmarks.large_vocabulary import _suite as large_vocabulary
from benchmarks.scaling import _suite as scaling
from tests.planner.compiled._hlo_text import computation, serialised


def test_scaling_divides_parameters_over_fsdp(monkeypatch):
  small = {"vocab_size": 64, "max_len": scaling.SEQ, "dim": 32, "layers": 1, "heads": 2}
  monkeypatch.setattr(scaling, "MODEL", small)
  _, (state, rows) = scaling.a_step("bf16", {"data": 1, "fsdp": 8}, batch=1)
  specs = {tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params)}
  assert any("fsdp" in spec for spec in specs)
  assert rows["tokens"].sharding.spec


def test_the_bytes_that_a_compiled_update_moves_through_main_memory():
  read = "%p0 = f32[8,4]{1,0} parameter(0); %p1 = s8[8,4]{1,0} parameter(1)"
  lines = (
    "%slice-start = ((f32[8,4]{1,0}), f32[2,4]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%p0), slice={[0:2], [0:4]};"
    "%on_chip = f32[2,4]{1,0:S(1)} slice-done(%slice-start);"
    "%both = (f32[8,4]{1,0:S(1)}, s8[8,4]{1,0}) custom-call(%on_chip, %p1);"
    "%first = f32[8,4]{1,0:S(1)} get-tuple-element(%both), index=0;"
    "%copy-start = (f32[8,4]{1,0}, f32[8,4]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%first);"
    "ROOT %out = f32[8,4]{1,0} copy-done(%copy-start)"
  )
  proto = serialised(f"HloModule m, is_scheduled=true\n\n{computation('ENTRY %main', f'{read}; {lines}')}")
  a_slice, codes, out = 32, 32, 128
  assert few_bytes.main_memory_bytes(proto) == a_slice + 2 * codes + out


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("%x = f32[8]{0} while(%p0), condition=%c, body=%b", "what a while moves"),
    (
      "%s = ((f32[8]{0}), f32[8]{0}) async-start(%p0), calls=%b; %x = f32[8]{0} async-done(%s)",
      "expected copy-start or slice, not negate",
    ),
  ],
)
def test_what_does_not_say_what_it_moves_is_refused(line, message):
  read = "%p0 = f32[8]{0} parameter(0)"
  called = computation("%b", f"{read}; ROOT %n = f32[8]{{0}} negate(%p0)")
  called += computation("%c", f"{read}; ROOT %y = pred[] custom-call(%p0)")
  proto = serialised(f"HloModule m\n\n{called}{computation('ENTRY %main', f'{read}; {line}')}")
  with pytest.raises(ValueError, match=message):
    few_bytes.main_memory_bytes(proto)


def test_the_loss_in_chunks_is_measured_beside_float64(monkeypatch):
  monkeypatch.setattr(large_vocabulary, "SMALL", {"rows": 600, "classes": 64, "width": 16})
  rows = large_vocabulary.errors()["errors"]
  assert [row["name"] for row in rows] == ["whole logits", "512 rows"] * 3
  most = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}
  assert all(max(row[key] for key in ("loss", "x", "kernel")) < most[row["policy"]] for row in rows)
