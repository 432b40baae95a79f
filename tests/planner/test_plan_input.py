"""What `mpjax.plan` refuses, and steps that it plans although no compiler takes them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax._install import pip_install
from mpjax.planner import _plan as planning
from mpjax.planner import get_target
from mpjax.planner.compiled import _compile as compilers
from tests.planner._steps import BATCH, F32, PARAMS, S, mlp

pytestmark = pytest.mark.optimised


def returns_first(*args):
  return args[0]


def over(devices, tree):
  """A tree that lies over a mesh of so many devices."""
  mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
  sharding = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=sharding), tree)


def fails_inside(params, batch):
  first = batch["x"] @ params["w1"]
  return first @ params["w1"]


def fails_on_a_value(params, batch):
  return 1 if batch["x"].sum() > 0 else 2


class Module(nnx.Module):
  def __init__(self):
    self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


ARGS = (PARAMS, BATCH)
EIGHT = over(8, PARAMS), BATCH
BAD = {
  "target": (
    mlp,
    ARGS,
    {"target": "h20"},
    r"unknown target 'h20': .*here, a100, .*v6e.*did you mean 'h200'\?",
  ),
  "line": (
    fails_inside,
    ARGS,
    {},
    rf"cannot be traced at test_plan_input.py:{fails_inside.__code__.co_firstlineno + 2}: TypeError: dot_general",
  ),
  "line of a jitted step": (
    jax.jit(fails_inside),
    ARGS,
    {},
    rf"cannot be traced at test_plan_input.py:{fails_inside.__code__.co_firstlineno + 2}: TypeError: dot_general",
  ),
  "value": (
    fails_on_a_value,
    ARGS,
    {},
    rf"cannot be traced at test_plan_input.py:{fails_on_a_value.__code__.co_firstlineno + 1}: Tracer",
  ),
  "too few": (mlp, (PARAMS,), {}, r"cannot be traced.*missing 1 required positional argument: 'batch'"),
  "mesh": (
    mlp,
    EIGHT,
    {"target": "h200:4"},
    r"mesh of 8 devices is larger than target h200:4, which has 4.*h200:8",
  ),
  "mesh on a tpu": (
    mlp,
    EIGHT,
    {"target": "v5e:1x2"},
    r"mesh of 8 devices is larger than .*v5e:1x2.*such as v5e:",
  ),
  "two meshes": (
    mlp,
    (EIGHT[0], over(4, BATCH)),
    {"target": "h200:8"},
    r"meshes of \[4, 8\] devices: expected one mesh",
  ),
  "mapping": (mlp, {"params": PARAMS}, {}, r"abstract_args of type dict: expected a tuple"),
  "one array": (mlp, S((2,), F32), {}, r"abstract_args of type ShapeDtypeStruct: expected a tuple"),
  "no function": (PARAMS, ARGS, {}, r"step of type dict: expected a function"),
  "unknown parameter": (
    mlp,
    ARGS,
    {"parts": {"weights": "master weights"}},
    r"parts has 'weights': expected .*batch, params",
  ),
  "unknown part": (
    mlp,
    ARGS,
    {"parts": {"params": "weights"}},
    r"parts\['params'\]='weights': expected one of master",
  ),
  "compile": (mlp, ARGS, {"compile": "yes"}, r"compile='yes': expected 'auto', True or False"),
  "donate twice": (jax.jit(mlp), ARGS, {"donate_argnums": 0}, r"donate_argnums with a jitted step"),
  "policy": (mlp, ARGS, {"policy": "fp61"}, r"unknown policy 'fp61'"),
  "static": (
    jax.jit(lambda params, n: params, static_argnums=1),
    (PARAMS, 3),
    {},
    r"static.*functools.partial",
  ),
  "static text": (
    jax.jit(lambda params, n: params, static_argnums=1),
    (PARAMS, "x"),
    {},
    r"functools.partial",
  ),
  "function": (
    returns_first,
    ({"w": S((2,), F32), "f": jnp.tanh},),
    {},
    r"expected arrays.*functools.partial",
  ),
  "module": (returns_first, (Module(),), {}, r"nnx.Module in an argument of the step: pass a TrainState"),
  "module inside": (returns_first, ({"m": Module()},), {}, r"nnx.Module in an argument"),
  "optimizer": (
    returns_first,
    (nnx.Optimizer(Module(), optax.adam(1e-3), wrt=nnx.Param),),
    {},
    r"nnx\.",
  ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("compile", ["auto", False])
def test_bad_input_says_what_was_expected(name, compile):
  step, args, options, message = BAD[name]
  with pytest.raises(ValueError, match=message):
    mpjax.plan(step, args, **{"compile": compile} | options)


@pytest.mark.parametrize(
  ("target", "extra"), [("h200", "plan-cuda"), ("v5e", "plan-tpu"), ("l4", "plan-cuda")]
)
def test_without_the_packages_a_plan_is_analytic_and_says_what_to_install(target, extra, monkeypatch):
  monkeypatch.setattr(compilers, "_absent", lambda package: True)
  assert pip_install(extra) in compilers.missing(get_target(target))
  plan = mpjax.plan(mlp, ARGS, target=target)
  assert plan.compiled is None
  assert plan.peak == plan.memory.peak
  [note] = [note for note in plan.notes if "pip install" in note]
  assert pip_install(extra) in note
  with pytest.raises(ValueError, match=rf"compile=True: .*\[{extra}\]"):
    mpjax.plan(mlp, ARGS, target=target, compile=True)


def test_a_gpu_that_the_installed_cuda_is_too_new_for_is_planned_without_it(monkeypatch):
  monkeypatch.setattr(compilers, "_absent", lambda package: package == "jax_cuda12_plugin")
  assert compilers.missing(get_target("t4")) == ""
  plan = mpjax.plan(mlp, ARGS, target="v100")
  assert plan.compiled is None
  assert plan.floor is not None
  [note] = [note for note in plan.notes if "analytic only" in note]
  assert "compute capability 7.5 on, and v100 has 7.0" in note
  with pytest.raises(ValueError, match=r"compile=True: .*v100 has 7\.0"):
    mpjax.plan(mlp, ARGS, target="v100", compile=True)
  monkeypatch.setattr(compilers, "_absent", lambda package: package == "jax_cuda13_plugin")
  assert compilers.missing(get_target("v100")) == ""


def test_a_step_that_the_compiler_gives_up_is_planned_all_the_same(monkeypatch):
  def gives_up(*args):
    raise compilers.CompileError("RESOURCE_EXHAUSTED: out of memory", out_of_memory=True)

  monkeypatch.setattr(planning, "compile_step", gives_up)
  plan = mpjax.plan(mlp, ARGS)
  assert plan.compiled is None
  assert any("the compiler failed, out of memory: RESOURCE_EXHAUSTED" in note for note in plan.notes)
  with pytest.raises(compilers.CompileError):
    mpjax.plan(mlp, ARGS, compile=True)


def prints(params, batch):
  jax.debug.print("{}", batch["x"].sum())
  return mlp(params, batch)


def calls_back(params, batch):
  return mlp(params, batch) + jax.pure_callback(lambda x: x.sum(), S((), F32), batch["x"])


@pytest.mark.aot
@pytest.mark.parametrize("step", [prints, calls_back])
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_step_that_cannot_travel_to_the_compiler_is_planned_all_the_same(step, target):
  if lacks := compilers.missing(get_target(target)):
    pytest.skip(lacks)
  plan = mpjax.plan(step, ARGS, target=target)
  if plan.compiled is None:
    assert any(note.startswith("the compiler failed: ") for note in plan.notes)
