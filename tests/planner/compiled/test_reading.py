"""What plans read from the programs of several releases' compilers: whole, damaged, or none at all.

A plan never fails because of a program's text, and says so where it did not understand it.
"""

import dataclasses
import functools
import random
import re

import jax
import pytest

import mpjax
from mpjax import _compat  # which release the analytic plan is of
from mpjax.planner import ARGUMENT_PARTS
from mpjax.planner import _plan as planning  # whose compiler is replaced
from mpjax.planner.compiled import read_program
from tests.planner.compiled.programs import KEPT, STEPS, VERSIONS, kept

UNREADABLE = "the compiled program cannot be read"
PROGRAMS = [(v, name, t) for v, name, t in KEPT if name in ("training", "crossing", "fsdp")]
TRAINING = VERSIONS[0], "training", "here"


@functools.cache
def jitted(name):
  step = STEPS[name][0]()
  return jax.jit(step.function, donate_argnums=step.donated), step.args


def read(version, name, target, change=lambda text: text):
  """The plan of a function as if the compiler of a target had written a text of ours, and what that is read with."""
  program, given = kept(version, name, target), []
  changed = dataclasses.replace(program, text=change(program.text))

  def spy(program, *others):
    given.extend(others)
    return read_program(program, *others)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(planning, "missing", lambda _: "")
    patch.setattr(planning, "compile_step", lambda *_: changed)
    patch.setattr(planning, "read_program", spy)
    patch.setattr(_compat, "has_newer_xla", lambda: not version.startswith("0.10"))
    step, args = jitted(name)
    return mpjax.plan(step, *args, target=target, compile=True), given


plan_of = lambda *args: read(*args)[0]
whole = functools.cache(read)


NEAR_ON_A_GPU = (
  "training",
  "step",
  "half precision",
  "wide layers",
  "computing again",
  "scan in half precision",
)
# A newer compiler for CPUs keeps half precision as it is, and computes again what it was told to.
NEAR = {(v, name, "h200"): 0.1 for v in VERSIONS for name in NEAR_ON_A_GPU}
NEAR |= {
  (VERSIONS[-1], "computing again", "here"): 0.1,
  (VERSIONS[-1], "scan in half precision", "here"): 0.2,
}


def test_whole_texts_are_understood_and_near_the_analytic_plan():
  for program in KEPT:
    plan, _ = whole(*program)
    compiled = plan.compiled
    assert not [note for note in plan.notes if "compiled program" in note], program
    assert sum(compiled.memory.parts.values()) == compiled.peak == plan.peak == kept(*program).peak, program
    arguments = [sum(m.parts.get(part, 0) for part in ARGUMENT_PARTS) for m in (plan.memory, compiled.memory)]
    assert arguments == [compiled.arguments] * 2, program
    # On a TPU small values are on the chip, which its program does not show.
    assert compiled.explained > (0.5 if program[2].startswith("v5e") else 0.98), program
    if program in NEAR:
      assert plan.memory.peak / plan.peak == pytest.approx(1, abs=NEAR[program]), program


def lines_that(change, count=3):
  """A damage to some instructions."""

  def damage(text, chance):
    lines = text.splitlines()
    instructions = [i for i, line in enumerate(lines) if line.startswith("  ") and " = " in line]
    for i in chance.sample(instructions, count):
      lines[i] = change(lines[i], chance)
    return "\n".join(lines)

  return damage


def lost_lines(text, chance):
  lines = text.splitlines()
  lost = set(chance.sample(range(1, len(lines)), 3))
  return "\n".join(line for i, line in enumerate(lines) if i not in lost)


def has_another_dtype(line, chance):
  return re.sub(
    r"\b(f32|bf16|s32)\[", chance.choice(("f64", "bf16", "s8", "token", "?")) + "[", line, count=1
  )


def is_larger(line, chance):
  larger = lambda found: f"[{int(found[1]) * chance.choice((2, 3, 1000))}"
  return re.sub(r"(?<=\w)\[(\d+)", larger, line, count=1)


def opcodes(text):
  return sorted(set(re.findall(r"(?<= )[a-z][a-z\-]*(?=\()", text)))


def unknown_opcodes(text, chance):
  for opcode in chance.sample(opcodes(text), 2):
    text = text.replace(f" {opcode}(", f" {opcode}x(")
  return text


def swapped_opcodes(text, chance):
  one, other = chance.sample(opcodes(text), 2)
  return text.replace(f" {one}(", " \0(").replace(f" {other}(", f" {one}(").replace(" \0(", f" {other}(")


def other_attributes(text, chance):
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


def other_letters(text, chance):
  letters = list(text)
  for i in chance.sample(range(len(letters)), 10):
    letters[i] = chance.choice(" (){}%=,x9")
  return "".join(letters)


DAMAGES = {
  "lost lines": lost_lines,
  "cut lines": lines_that(lambda line, chance: line[: chance.randrange(line.index(" = "), len(line))]),
  "cut short": lambda text, chance: text[: chance.randrange(len(text) // 10, len(text) - 5)],
  "other dtypes": lines_that(has_another_dtype),
  "other sizes": lines_that(is_larger, 5),
  "unknown opcodes": unknown_opcodes,
  "swapped opcodes": swapped_opcodes,
  "other attributes": other_attributes,
  "other letters": other_letters,
}


def figures(compiled, collectives):
  """What a plan has from a program's text."""
  crossing = {f"{c.operation} {c.dtype}": c.nbytes for c in collectives}
  return crossing | compiled.kernels | compiled.memory.parts


def near(found, wanted, peak):
  """Whether no figure is off by more than a tenth, or a hundredth of the peak."""
  return all(
    abs(found.get(name, 0) - wanted.get(name, 0)) <= max(0.1 * wanted.get(name, 0), 0.01 * peak)
    for name in found | wanted
  )


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_text_gives_the_figures_of_the_whole_one_or_a_note(name):
  damage = DAMAGES[name]
  for program in PROGRAMS:
    plan, given = whole(*program)
    for seed in range(2):
      text = damage(kept(*program).text, random.Random(seed))
      reading = read_program(dataclasses.replace(kept(*program), text=text), *given)
      assert all("\n" not in note for note in reading.notes), (program, seed)
      assert reading.compiled.peak == plan.peak == sum(reading.compiled.memory.parts.values()), (
        program,
        seed,
      )
      found, wanted = figures(*reading[:2]), figures(plan.compiled, plan.collectives)
      assert reading.notes or near(found, wanted, plan.peak), (program, seed)
  known = whole(*TRAINING)[0]
  damaged = plan_of(*TRAINING, lambda text: damage(text, random.Random(0)))
  printed = "".join(str(damaged).split())
  assert all("".join(note.split()) in printed for note in damaged.notes)
  assert (damaged.memory, damaged.peak) == (known.memory, known.peak)


@pytest.mark.parametrize("text", ["", "HloModule nothing\n", "\0", "ENTRY %e () -> f32[] {\n}\n"])
def test_no_program_at_all_leaves_the_compilers_totals_and_one_note(text):
  plan, (known, _) = plan_of(*TRAINING, lambda _: text), whole(*TRAINING)
  (note,) = set(plan.notes) - set(known.notes)
  assert note.startswith(UNREADABLE)
  totals = lambda c: (c.arguments, c.outputs, c.aliases, c.temporaries, c.peak)
  assert totals(plan.compiled) == totals(known.compiled)
  assert (plan.compiled.kernels, plan.collectives) == ({}, ())


def test_a_computation_that_calls_itself_is_no_failure():
  def looped(text):
    name = re.search(r"^%([\w.\-]+) \(", text, re.MULTILINE)[1]
    return re.sub(r"(calls|body|to_apply)=%[\w.\-]+", rf"\1=%{name}", text)

  assert plan_of(*TRAINING, looped).peak == whole(*TRAINING)[0].peak


@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_a_collective_that_never_ends_is_said_and_not_counted(target):
  program = VERSIONS[-1], "crossing", target
  plan = plan_of(*program, lambda text: re.sub(r"collective-permute-done\(", "negate(", text))
  assert any("begin in the compiled program and do not end" in note for note in plan.notes)
  operations = {c.operation for c in whole(*program)[0].collectives}
  assert {c.operation for c in plan.collectives} == operations - {"collective-permute"}
