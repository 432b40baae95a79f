"""A plan never fails because a compiled program's text cannot be read."""

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.planner import _plan as planning
from mpjax.planner import compiled

pytestmark = pytest.mark.optimised
UNREADABLE = "the compiled program cannot be read"
SEEDS = range(12)


def training():
  """A step with a loop over layers, and the shapes of its arguments."""
  tx = optax.adamw(1e-3)

  def loss(params, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

  def step(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  params = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
  batch = jax.ShapeDtypeStruct((128, 64), jnp.float32)
  return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(tx.init, params), batch)


@pytest.fixture(scope="module")
def whole():
  """The plan of the step, and its compiled program."""
  step, args = training()
  made = []
  with pytest.MonkeyPatch.context() as patch:
    compile_step = planning.compile_step
    patch.setattr(planning, "compile_step", lambda *given: made.append(compile_step(*given)) or made[-1])
    return mpjax.plan(step, args), made[0]


@pytest.fixture
def plan_of(whole, monkeypatch):
  """Plans the step as if its compiler had written another text."""
  step, args = training()

  def plan(text):
    changed = dataclasses.replace(whole[1], text=text)
    monkeypatch.setattr(planning, "compile_step", lambda *_: changed)
    return mpjax.plan(step, args, compile=True)

  return plan


def instructions(text):
  """Numbers of the lines that are instructions."""
  return [i for i, line in enumerate(text.splitlines()) if line.startswith("  ") and " = " in line]


def without_lines(text, chance):
  lines = text.splitlines()
  entry = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
  # Whatever else is lost, an argument is.
  arguments = [i for i in instructions(text) if i > entry and " parameter(" in lines[i]]
  lost = {*chance.sample(instructions(text), 5), chance.choice(arguments)}
  return "\n".join(line for i, line in enumerate(lines) if i not in lost)


def with_cut_lines(text, chance):
  lines = text.splitlines()
  for i in chance.sample(instructions(text), 5):
    lines[i] = lines[i][: chance.randrange(lines[i].index(" = ") + 3, lines[i].index("(") + 1)]
  return "\n".join(lines)


def cut_short(text, chance):
  return text[: chance.randrange(len(text) // 10, text.index("ENTRY") + 5)]


def with_other_types(text, chance):
  lines = text.splitlines()
  for i in (i for i in instructions(text) if " parameter(" in lines[i]):
    lines[i] = re.sub(r"f32\[([\d,]+)\]", rf"{chance.choice(('f64', 'token', '?'))}[\1]", lines[i])
  return "\n".join(lines)


def with_other_opcodes(text, chance):
  there = sorted(set(re.findall(r"(?<= )[a-z][a-z\-]*(?=\()", text)) - {"parameter"})
  for opcode in ("parameter", *chance.sample(there, min(4, len(there)))):
    text = re.sub(rf" {opcode}\(", f" {opcode}x(", text)
  return text


def with_other_attributes(text, chance):
  words = ("calls", "body", "condition", "index", "parameter(", "dim_labels", "to_apply", "ROOT ")
  for word in chance.sample(words, 5):
    text = text.replace(word, f"{word[:-1]}_")
  return text.replace("parameter(0", "parameter(a")


DAMAGES = [
  without_lines,
  with_cut_lines,
  cut_short,
  with_other_types,
  with_other_opcodes,
  with_other_attributes,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_text_that_cannot_be_read_gives_the_compilers_totals_and_one_note(damage, whole, plan_of):
  plan, program = whole
  for seed in SEEDS:
    damaged = plan_of(damage(program.text, random.Random(seed)))
    (note,) = [note for note in damaged.notes if note.startswith(UNREADABLE)]
    assert "\n" not in note
    assert set(damaged.notes) - {note} == set(plan.notes)
    found, known = damaged.compiled, plan.compiled
    assert (found.arguments, found.outputs, found.aliases, found.temporaries, found.peak) == (
      known.arguments,
      known.outputs,
      known.aliases,
      known.temporaries,
      known.peak,
    )
    assert sum(found.memory.parts.values()) == found.peak
    assert damaged.memory == plan.memory
    assert damaged.collectives == ()
    assert UNREADABLE in str(damaged)


def test_letters_lost_anywhere_never_fail_a_plan(whole, plan_of):
  plan, program = whole
  for seed in SEEDS:
    chance = random.Random(seed)
    text = list(program.text)
    for i in chance.sample(range(len(text)), 20):
      text[i] = chance.choice(" (){}%=,x9")
    damaged = plan_of("".join(text))
    assert damaged.peak == plan.peak
    assert str(damaged)


@pytest.mark.parametrize("text", ["", "HloModule nothing\n", "\0", "ENTRY %e () -> f32[] {\n}\n"])
def test_no_program_at_all_is_no_failure(text, whole, plan_of):
  assert plan_of(text).peak == whole[0].peak


def test_a_computation_that_calls_itself_is_no_failure(whole, plan_of):
  text = whole[1].text
  name = re.search(r"^%([\w.\-]+) \(", text, re.MULTILINE)[1]
  looped = re.sub(r"(calls|body|to_apply)=%[\w.\-]+", rf"\1=%{name}", text)
  assert plan_of(looped).peak == whole[0].peak


def test_a_whole_text_is_read_without_a_note(whole, plan_of):
  plan, program = whole
  assert not [note for note in plan.notes if note.startswith(UNREADABLE)]
  assert plan_of(program.text).compiled.memory.parts.keys() == plan.compiled.memory.parts.keys()
  assert compiled.parse(program.text).results()
