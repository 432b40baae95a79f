"""A plan never fails because of a compiled program's text, and says so where it did not understand it."""

import dataclasses
import random
import re

import jax
import pytest

import mpjax
from mpjax.planner import _plan as planning
from tests.planner.compiled.programs import STEPS, VERSIONS, kept

UNREADABLE = "the compiled program cannot be read"
PROGRAMS = [(name, target) for name in ("training", "crossing", "fsdp") for target in STEPS[name][1]]
SEEDS = range(2)
WHOLE: dict = {}


@pytest.fixture
def plan_of(monkeypatch):
  """Plans a function as if the compiler of a target had written a text of ours."""
  monkeypatch.setattr(planning, "missing", lambda _: "")

  def plan(version, name, target, change=lambda text: text):
    step = STEPS[name][0]()
    program = kept(version, name, target)
    changed = dataclasses.replace(program, text=change(program.text))
    monkeypatch.setattr(planning, "compile_step", lambda *_: changed)
    jitted = jax.jit(step.function, donate_argnums=step.donated)
    return mpjax.plan(jitted, step.args, target=target, compile=True)

  return plan


@pytest.fixture
def whole(plan_of):
  """Returns the plan of a program whose text is as it was."""

  def plan(*program):
    if program not in WHOLE:
      WHOLE[program] = plan_of(*program)
    return WHOLE[program]

  return plan


def instructions(text):
  """Numbers of the lines that are instructions."""
  return [i for i, line in enumerate(text.splitlines()) if line.startswith("  ") and " = " in line]


def changed_lines(text, chance, change, count=3):
  lines = text.splitlines()
  for i in chance.sample(instructions(text), count):
    lines[i] = change(lines[i])
  return "\n".join(lines)


def without_lines(text, chance):
  lines = text.splitlines()
  lost = set(chance.sample(range(1, len(lines)), 3))
  return "\n".join(line for i, line in enumerate(lines) if i not in lost)


def with_cut_lines(text, chance):
  return changed_lines(text, chance, lambda line: line[: chance.randrange(line.index(" = "), len(line))])


def cut_short(text, chance):
  return text[: chance.randrange(len(text) // 10, len(text) - 5)]


def with_other_dtypes(text, chance):
  other = lambda found: chance.choice(("f64", "bf16", "s8", "token", "?")) + "["
  return changed_lines(text, chance, lambda line: re.sub(r"\b(f32|bf16|s32)\[", other, line, count=1))


def with_other_sizes(text, chance):
  larger = lambda found: f"[{int(found[1]) * chance.choice((2, 3, 1000))}"
  return changed_lines(text, chance, lambda line: re.sub(r"(?<=\w)\[(\d+)", larger, line, count=1), 5)


def opcodes(text):
  return sorted(set(re.findall(r"(?<= )[a-z][a-z\-]*(?=\()", text)))


def with_unknown_opcodes(text, chance):
  for opcode in chance.sample(opcodes(text), 2):
    text = text.replace(f" {opcode}(", f" {opcode}x(")
  return text


def with_swapped_opcodes(text, chance):
  one, other = chance.sample(opcodes(text), 2)
  return text.replace(f" {one}(", " \0(").replace(f" {other}(", f" {one}(").replace(" \0(", f" {other}(")


def with_other_attributes(text, chance):
  words = (
    "calls",
    "body",
    "condition",
    "index",
    "dim_labels",
    "to_apply",
    "ROOT ",
    "contracting_dims",
    '"n"',
  )
  for word in chance.sample(words, 2):
    text = text.replace(word, f"{word[:-1]}_")
  return text


def with_other_letters(text, chance):
  letters = list(text)
  for i in chance.sample(range(len(letters)), 10):
    letters[i] = chance.choice(" (){}%=,x9")
  return "".join(letters)


DAMAGES = [
  without_lines,
  with_cut_lines,
  cut_short,
  with_other_dtypes,
  with_other_sizes,
  with_unknown_opcodes,
  with_swapped_opcodes,
  with_other_attributes,
  with_other_letters,
]


def figures(plan):
  """What a plan has from a program's text."""
  crossing = {f"{c.operation} {c.dtype}": c.nbytes for c in plan.collectives}
  return crossing | plan.compiled.kernels | plan.compiled.memory.parts


def near(found, wanted, peak):
  """Whether no figure is off by more than a tenth, or a hundredth of the peak."""
  return all(
    abs(found.get(name, 0) - wanted.get(name, 0)) <= max(0.1 * wanted.get(name, 0), 0.01 * peak)
    for name in found | wanted
  )


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_damaged_text_gives_the_figures_of_the_whole_one_or_a_note(version, damage, plan_of, whole):
  for name, target in PROGRAMS:
    plan = whole(version, name, target)
    for seed in SEEDS:
      damaged = plan_of(version, name, target, lambda text, seed=seed: damage(text, random.Random(seed)))
      notes = set(damaged.notes) - set(plan.notes)
      assert all("\n" not in note for note in notes)
      printed = "".join(str(damaged).split())
      assert all("".join(note.split()) in printed for note in notes)
      assert damaged.peak == plan.peak == sum(damaged.compiled.memory.parts.values())
      assert damaged.memory == plan.memory
      assert notes or near(figures(damaged), figures(plan), plan.peak), (name, target, seed)


@pytest.mark.parametrize("text", ["", "HloModule nothing\n", "\0", "ENTRY %e () -> f32[] {\n}\n"])
def test_no_program_at_all_leaves_the_compilers_totals_and_one_note(text, plan_of, whole):
  program = VERSIONS[0], "training", "here"
  plan, known = plan_of(*program, lambda _: text), whole(*program)
  (note,) = set(plan.notes) - set(known.notes)
  assert note.startswith(UNREADABLE)
  found = plan.compiled
  assert (found.arguments, found.outputs, found.aliases, found.temporaries, found.peak) == (
    known.compiled.arguments,
    known.compiled.outputs,
    known.compiled.aliases,
    known.compiled.temporaries,
    known.compiled.peak,
  )
  assert (found.kernels, plan.collectives) == ({}, ())


def test_a_computation_that_calls_itself_is_no_failure(plan_of, whole):
  program = VERSIONS[0], "training", "here"

  def looped(text):
    name = re.search(r"^%([\w.\-]+) \(", text, re.MULTILINE)[1]
    return re.sub(r"(calls|body|to_apply)=%[\w.\-]+", rf"\1=%{name}", text)

  assert plan_of(*program, looped).peak == whole(*program).peak


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_texts_are_understood(version, whole):
  for name, target in PROGRAMS:
    notes = [note for note in whole(version, name, target).notes if "compiled program" in note]
    assert not notes, (name, target)


@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_a_collective_that_never_ends_is_said_and_not_counted(target, plan_of, whole):
  program = VERSIONS[-1], "crossing", target
  lost = lambda text: re.sub(r"collective-permute-done\(", "negate(", text)
  plan = plan_of(*program, lost)
  assert any("begin in the compiled program and do not end" in note for note in plan.notes)
  operations = {c.operation for c in whole(*program).collectives}
  assert {c.operation for c in plan.collectives} == operations - {"collective-permute"}
