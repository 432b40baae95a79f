"""The report says every figure of a plan, side by side with the others', within the width."""

import dataclasses

import pytest

from mpjax._render.plain_text import bytes_text as in_words
from mpjax._render.tables import tables_text
from mpjax.planner import ARGUMENT_PARTS, TRANSIENT_PARTS, Collective, Floor, Note
from mpjax.planner._report import NO_FIT, answer_of, sections_of
from tests.planner._plans import PARAMETERS, a_plan, a_product, a_time, the_head

POLICIES = ("fp32", "bf16", "bf16_pure")


def as_text(plans):
  return tables_text(sections_of(plans))


def lines_of(text, start):
  return [line for line in text.splitlines() if line.startswith(start)]


def test_every_part_and_figure_is_there_in_its_order():
  crossing = Collective("all-reduce", "bfloat16", 123_000_000, 7, ("GPT/blocks",))
  kernel = a_product(kernel="flash", batch=36, flops=0)
  plan = a_plan(products=(the_head(), kernel), notes=(Note("pad it"),), collectives=(crossing,), devices=8)
  text = as_text([plan])
  for part, nbytes in plan.memory.parts.items():
    line, *_ = lines_of(text, f"{part} ")
    assert in_words(nbytes) in line
  for figure in (plan.memory.peak, plan.compiled.peak, plan.device_memory):
    assert in_words(figure) in text, figure
  words = ["h200", "NVIDIA H200 SXM", f"{PARAMETERS:,} parameters", "mu float32", "no step is faster than"]
  words += ["16384x50257x768", "16384x50264x768", "N = 50257 is no multiple of 8", "GPT/head", "flash"]
  words += [
    "pad it",
    "8 of NVIDIA",
    "all-reduce",
    "123.00 MB",
    "model.py:30",
    "16x1024x12x64",
    "36 kernels of",
  ]
  for word in words:
    assert word in text, word
  assert "saved10" not in text  # the least of the saved activations
  names = [line.split("  ")[0] for line in text.splitlines()]
  order = [name for name in names if name in (*ARGUMENT_PARTS, *TRANSIENT_PARTS)]
  assert order == sorted(order, key=(*ARGUMENT_PARTS, *TRANSIENT_PARTS).index)


def test_each_of_several_plans_has_a_row_and_its_own_tables():
  tables = list(sections_of([a_plan(policy) for policy in POLICIES]))
  assert [row[0] for row in tables[0].rows[1:]] == list(POLICIES)
  memory = [table for table in tables if table.name == "memory"]
  assert [table.rows[0][1] for table in memory] == list(POLICIES)
  many = [a_plan(label=f"policy {i}") for i in range(12)]
  assert max(map(len, as_text(many).splitlines())) <= 116


def test_without_a_compiler_there_are_no_rows_of_it():
  text = as_text([a_plan(compiled=False)])
  assert "by the compiler" not in text
  assert "peak, compiled" not in text


def test_the_first_table_says_what_each_needs_and_whether_it_fits():
  assert NO_FIT not in as_text([a_plan()])
  first = as_text([a_plan("fp32", device_memory=10**9), a_plan("bf16")]).split("\n\n")[0]
  assert in_words(a_plan("bf16").peak) in first
  assert first.count(NO_FIT) == 1


def test_a_step_has_to_fit_what_jax_takes():
  need = a_plan().peak
  plan = a_plan(device_memory=int(1.1 * need), usable_memory=int(0.8 * need))
  assert NO_FIT in as_text([plan])
  assert f"of the {in_words(plan.usable_memory)} that JAX takes" in str(plan)
  assert "advice: XLA_PYTHON_CLIENT_MEM_FRACTION=0.91 in the environment" in str(plan)
  roomy = str(a_plan(device_memory=2 * need, usable_memory=int(1.5 * need)))
  assert NO_FIT not in roomy
  assert "in the environment" not in roomy


def test_the_answer_of_a_plan_says_whether_it_fits_and_what_to_change_in_twelve_lines():
  floor = Floor(0.0123, {"matrix units": 0.0123, "memory": 0.001}, "matrix units", 10**9)
  changes = {"products": (the_head(), a_product()), "usable_memory": 100 * 10**9, "floor": floor}
  plan = a_plan(notes=tuple(Note(f"note {i}") for i in range(9)), **changes)
  lines = str(plan).splitlines()
  assert len(lines) == 12
  assert max(map(len, lines)) <= 116
  text = str(plan)
  for words in (
    f"fits: {in_words(plan.peak)} of the 100.00 GB that JAX takes",
    "largest: activations",
    "bfloat16 100.0%",
    "GPT/head",
    "N = 50257 is no multiple of 8",
    "time: about 25.00 ms (+-35%) by the roofline of the compiled program; at least 12.30 ms (matrix units)",
    "largest: products 12.50 ms, element-wise 7.50 ms, collectives 5.00 ms",
    "larger batch",
  ):
    assert words in text, words
  assert lines[-1].startswith("more: .table(")
  assert plan.tables == ("summary", "memory", "activations", "products", "time", "notes")
  full = a_plan(device_memory=10**9, products=(a_product(),), notes=())
  assert f"{NO_FIT}: {in_words(full.peak)} of the 1.00 GB of a device" in str(full)
  assert any("activations" in line and "recompute" in line for line in answer_of([full]) if "advice" in line)
  assert "all at the full rate" in str(full)


def test_the_answer_of_several_plans_is_one_table():
  plans = [a_plan("fp32", time=a_time(0.05)), a_plan("bf16"), a_plan("bf16_pure", device_memory=1)]
  _, heading, *rows = answer_of(plans)
  assert [row.split()[0] for row in rows[:3]] == [plan.label for plan in plans]
  assert [NO_FIT in row for row in rows[:3]] == [False, False, True]
  assert all("products  12.30 ms" in row for row in rows[:3])
  assert "full rate" in heading
  many = [dataclasses.replace(plans[0], label=f"policy{i}") for i in range(30)]
  assert len(answer_of(many, ["cheapest: policy0"])) <= 11


def test_rates_are_those_of_the_estimated_time():
  plan = a_plan(items=16384, item="tokens", model_flops=10**13, peak_flops=989e12, devices=8)
  assert plan.throughput == pytest.approx(16384 / 0.025)
  assert plan.utilisation == pytest.approx(1e13 / 0.025 / 989e12)
  [line] = [line for line in answer_of([plan], rates=True) if line.startswith("rate:")]
  assert "655,360 tokens/s;" in line
  assert "40.4% of 989.00 TFLOP/s" in line
  _, heading, row, *_ = answer_of([plan, a_plan(time=None)], rates=True)
  assert heading.split()[-2:] == ["tokens/s", "MFU"]
  assert row.split()[-2:] == ["655,360", "40.4%"]
  table = a_plan(items=16384, item="tokens").table("time")
  assert tuple(lines_of(table, "tokens a second")[0].rsplit(None, 1)) == ("tokens a second", "655,360")
  assert plan.to_dict()["throughput"] == plan.throughput
