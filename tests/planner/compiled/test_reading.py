"""What plans read from the programs of several releases' compilers: whole, damaged, or none at all.

A plan never fails because of a program, and says so where it did not understand it.
"""

import dataclasses
import functools
import random
import sys

import jax
import pytest

import mpjax
from mpjax import _compat  # which release the analytic plan is of
from mpjax.planner import ARGUMENT_PARTS, _plan as planning
from mpjax.planner._plan import read_program
from mpjax.planner._program import collectives_of, live_at_peak
from mpjax.planner.compiled._from_hlo import from_hlo
from mpjax.planner.compiled._proto import module_class  # to change a program
from tests.planner.compiled.programs import KEPT, STEPS, VERSIONS, kept, parsed

UNREADABLE = "the compiled program cannot be read"
PROGRAMS = [(v, name, t) for v, name, t in KEPT if name in ("training", "crossing", "fsdp")]
TRAINING = VERSIONS[0], "training", "here"


@functools.cache
def jitted(name):
  step = STEPS[name][0]()
  return jax.jit(step.function, donate_argnums=step.donated), step.args


def read(version, name, target, change=lambda proto: proto):
  """The plan of a function as if the compiler of a target had made a program of ours, and what that is read with."""
  program, given = kept(version, name, target), []
  changed = dataclasses.replace(program, proto=change(program.proto))

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


NEAR_ON_A_GPU = ("step", "half precision", "wide layers", "computing again")
# A newer compiler for CPUs computes again what it was told to.
NEAR = {(v, name, "h200"): 0.1 for v in VERSIONS for name in NEAR_ON_A_GPU}
NEAR |= {(VERSIONS[-1], "computing again", "here"): 0.1}


def test_whole_programs_are_understood_and_near_the_analytic_plan():
  for program in KEPT:
    plan, _ = whole(*program)
    compiled = plan.compiled
    assert not [note for note in plan.notes if "compiled program" in note], program
    assert sum(compiled.memory.parts.values()) == compiled.peak == plan.peak == kept(*program).peak, program
    arguments = [sum(m.parts.get(part, 0) for part in ARGUMENT_PARTS) for m in (plan.memory, compiled.memory)]
    assert arguments == [compiled.arguments] * 2, program
    # On a TPU small values are on the chip, which its program does not show; a CPU's compiler puts small
    # temporaries where results will be, which is not followed.
    assert compiled.explained > (0.9 if program[2].startswith("h200") else 0.5), program
    if program[1:] == ("fsdp", "h200:8"):  # the share of a weight in half precision
      assert compiled.memory.parts["compute copies"] == 2 * 512 * 2048 // 4, program
    if program in NEAR:
      assert plan.memory.peak / plan.peak == pytest.approx(1, abs=NEAR[program]), program


def test_worst_moment_takes_the_temporary_memory_of_the_compiler():
  """Of what is kept. The rest lies between buffers: each begins at a multiple of some bytes, and not all can be packed.

  In small programs a compiler puts what is short-lived where a result will be; a part of the peak allows for it.
  """
  for version, name, target in KEPT:
    made = kept(version, name, target)
    nbytes = live_at_peak(from_hlo(parsed(version, name, target))).nbytes
    known = made.live - (made.outputs - made.aliases) if target.startswith("h200") else made.temporaries
    if target.startswith("v5e"):  # these are small, and on the chip
      known = min(known, nbytes)
    slack = 512 + made.peak * (0.1 if target.startswith("h200") else 0.35)
    assert 0.975 * known - 512 <= nbytes <= made.temporaries + slack, (version, name, target)


def edited(change):
  """A damage to the instructions of a program."""

  def damage(proto, chance):
    module = module_class().FromString(proto)
    change([i for computation in module.computations for i in computation.instructions], chance)
    return module.SerializeToString()

  return damage


def other_operands(instructions, chance):
  for instruction in chance.sample([i for i in instructions if i.operand_ids], 3):
    instruction.operand_ids[0] = chance.randrange(1000)


DAMAGES = {
  "cut short": lambda proto, chance: proto[: chance.randrange(len(proto) // 10, len(proto) - 5)],
  "other operands": edited(other_operands),
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
def test_a_damaged_program_gives_the_figures_of_the_whole_one_or_a_note(name):
  damage = DAMAGES[name]
  for program in PROGRAMS:
    plan, given = whole(*program)
    for seed in range(3):
      proto = damage(kept(*program).proto, random.Random(seed))
      compiled, read, notes = read_program(dataclasses.replace(kept(*program), proto=proto), *given)
      assert all("\n" not in note for note in notes), (program, seed)
      assert compiled.peak == plan.peak == sum(compiled.memory.parts.values()), (program, seed)
      found = figures(compiled, collectives_of(read) if read else ())
      assert notes or near(found, figures(plan.compiled, plan.collectives), plan.peak), (program, seed)
  known = whole(*TRAINING)[0]
  damaged = plan_of(*TRAINING, lambda proto: damage(proto, random.Random(0)))
  printed = "".join(str(damaged).split())
  assert all("".join(note.split()) in printed for note in damaged.notes)
  assert (damaged.memory, damaged.peak) == (known.memory, known.peak)


@pytest.mark.parametrize("proto", [b"", b"HloModule nothing", b"\0", b"\n\1m"])
def test_no_program_at_all_leaves_the_compilers_totals_and_one_note(proto):
  plan, (known, _) = plan_of(*TRAINING, lambda _: proto), whole(*TRAINING)
  (note,) = set(plan.notes) - set(known.notes)
  assert note.startswith(UNREADABLE)
  totals = lambda c: (c.arguments, c.outputs, c.aliases, c.temporaries, c.peak)
  assert totals(plan.compiled) == totals(known.compiled)
  assert (plan.compiled.kernels, plan.collectives) == ({}, ())


def test_without_protobuf_the_compilers_totals_are_left(monkeypatch):
  module_class.cache_clear()
  monkeypatch.setitem(sys.modules, "google.protobuf", None)
  plan = plan_of(*TRAINING)
  assert any(note.startswith(f"{UNREADABLE} (") and "protobuf" in note for note in plan.notes)
  assert plan.peak == whole(*TRAINING)[0].peak
