"""What `mpjax.plan` refuses, and steps that it plans although no compiler takes them."""

import functools
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._render.plain_text import pip_install  # the command of the package manager that is in use
from mpjax.planner import CompileError, _plan as planning, get_target, missing
from tests.planner._steps import BATCH, F32, PARAMS, S, mesh_of, mlp, on


def returns_first(*args):
  return args[0]


def fails_inside(params, batch):
  first = batch["x"] @ params["w1"]
  return first @ params["w1"]


def fails_on_a_value(params, batch):
  return 1 if batch["x"].sum() > 0 else 2


class Module(nnx.Module):
  def __init__(self):
    self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


ARGS = (PARAMS, BATCH)
EIGHT = on(mesh_of(data=8), PARAMS), BATCH
TWO_MESHES = EIGHT[0], on(mesh_of(data=4), BATCH)
WITH_FUNCTION = ({"w": S((2,), F32), "f": jnp.tanh},)
MODULE = "nnx.Module in an argument of the step: pass a TrainState"
static = functools.partial(jax.jit, lambda params, n: params, static_argnums=1)
line_of = lambda f, line: rf"cannot be traced at test_plan_input.py:{f.__code__.co_firstlineno + line}: "
BAD = [
  (mlp, ARGS, {"target": "h20"}, r"unknown target 'h20': .*here, a100, .*v6e.*did you mean 'h200'\?"),
  (fails_inside, ARGS, {}, line_of(fails_inside, 2) + "TypeError: dot_general"),
  (jax.jit(fails_inside), ARGS, {}, line_of(fails_inside, 2) + "TypeError: dot_general"),
  (fails_on_a_value, ARGS, {}, line_of(fails_on_a_value, 1) + "Tracer"),
  (mlp, EIGHT, {"target": "h200:4"}, r"mesh of 8 devices is larger than target h200:4, which has 4.*h200:8"),
  (mlp, EIGHT, {"target": "v5e:1x2"}, r"mesh of 8 devices is larger than .*v5e:4x4"),
  (mlp, TWO_MESHES, {"target": "h200:8"}, r"meshes of \[4, 8\] devices: expected one mesh"),
  (mlp, ARGS, {"parts": {"weights": "master weights"}}, r"parts has 'weights': expected .*batch, params"),
  (mlp, ARGS, {"parts": {"params": "weights"}}, r"parts\['params'\]='weights': expected one of master"),
  (mlp, ARGS, {"compile": "yes"}, r"compile='yes': expected 'auto', True or False"),
  (jax.jit(mlp), ARGS, {"donate_argnums": 0}, r"donate_argnums with a jitted step"),
  (mlp, ARGS, {"policy": "fp61"}, r"unknown policy 'fp61'"),
  (static(), (PARAMS, 3), {}, r"static.*functools.partial"),
  (static(), (PARAMS, "x"), {}, r"functools.partial"),
  (returns_first, WITH_FUNCTION, {}, r"expected arrays.*functools.partial"),
  (returns_first, (Module(),), {}, MODULE),
  (returns_first, ({"m": Module()},), {}, MODULE),
  (returns_first, (nnx.Optimizer(Module(), optax.sgd(0.1), wrt=nnx.Param),), {}, r"nnx\.Optimizer in an arg"),
]


def test_bad_input_says_what_was_expected():
  for step, args, options, message in BAD:
    with pytest.raises(ValueError, match=message):
      mpjax.plan(step, *args, **{"compile": False} | options)


def without(monkeypatch, *packages):
  for package in packages:
    monkeypatch.setitem(sys.modules, package, None)


def test_without_the_packages_a_plan_is_analytic_and_says_what_to_install(monkeypatch):
  without(monkeypatch, "libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "flatbuffers")
  for target, extra in (("h200", "plan-cuda"), ("v5e", "plan-tpu"), ("l4", "plan-cuda")):
    assert pip_install(extra) in missing(get_target(target))
    plan = mpjax.plan(mlp, *ARGS, target=target)
    assert (plan.compiled, plan.peak) == (None, plan.memory.peak)
    [note] = [note for note in plan.notes if "pip install" in note]
    assert pip_install(extra) in note
    with pytest.raises(ValueError, match=rf"compile=True: .*\[{extra}\]"):
      mpjax.plan(mlp, *ARGS, target=target, compile=True)


def test_a_step_that_the_compiler_gives_up_is_planned_all_the_same(monkeypatch):
  def gives_up(*args):
    raise CompileError("RESOURCE_EXHAUSTED: out of memory", out_of_memory=True)

  monkeypatch.setattr(planning, "compile_step", gives_up)
  plan = mpjax.plan(mlp, *ARGS)
  assert plan.compiled is None
  assert any("the compiler failed, out of memory: RESOURCE_EXHAUSTED" in note for note in plan.notes)
  with pytest.raises(CompileError):
    mpjax.plan(mlp, *ARGS, compile=True)


def test_a_step_that_this_machines_compiler_refuses_is_planned_all_the_same():
  unknown = lambda x: jax.ffi.ffi_call("no_such_call", S((2,), F32))(x) * 2
  plan = mpjax.plan(unknown, S((2,), F32))
  assert plan.compiled is None
  (note,) = [note for note in plan.notes if note.startswith("the compiler failed: ")]
  assert "no_such_call" in note
  with pytest.raises(CompileError, match="no_such_call") as raised:
    mpjax.plan(unknown, S((2,), F32), compile=True)
  assert not raised.value.out_of_memory
