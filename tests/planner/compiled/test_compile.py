"""Programs for described devices: how a step travels to their compilers, and plans by what those make of it."""

import functools
import json
import types

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

import mpjax
from mpjax.planner import CompileError, _plan as planning, get_target
from mpjax.planner.compiled import _compile, _worker
from mpjax.planner.compiled._compile import compile_step
from mpjax.planner.compiled._hlo import parse  # a process of its own is replaced
from tests.planner._steps import F32, S, described, mean_squares, mesh_of, on

for_devices = lambda test: pytest.mark.aot(pytest.mark.slow(test))
pytestmark = pytest.mark.optimised


class Compilers:
  """Compilers of described devices, which are this machine's: what they are asked for, and what they answer.

  Attributes:
    requests, topologies, flags: of each program.
    platform: what programs are exported for.
    failures: what happens instead, for each: the exit code and output of a process.
  """

  def __init__(self, patch):
    self.requests, self.topologies, self.flags, self.failures = [], [], [], []
    self.platform = "cpu"
    export = jax.export.export
    patch.setattr(jax.export, "export", lambda f, platforms, **kw: export(f, platforms=[self.platform], **kw))
    patch.setattr(topologies, "get_topology_desc", self.describe)
    patch.setattr(_compile, "_run", self.run)

  def describe(self, **asked):
    self.topologies.append(asked)
    return types.SimpleNamespace(devices=jax.devices())

  def run(self, folder, flags):
    self.flags.append(flags)
    self.requests.append(json.loads((folder / "request.json").read_text()))
    if self.failures:
      return self.failures.pop(0)
    _worker.main(folder)
    return 0, ""


@pytest.fixture
def compilers(monkeypatch):
  return Compilers(monkeypatch)


def double(x, y):
  return {"y": 2 * y, "x": jnp.tanh(x) @ x}


SQUARE = S((64, 64), F32)


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_step_travels_with_what_it_gives_up_and_comes_back_with_its_figures(target, compilers):
  program = compile_step(double, (SQUARE, S((8,), jnp.bfloat16)), [0], get_target(target))
  assert (program.arguments, program.aliases) == (64 * 64 * 4 + 16, 64 * 64 * 4)
  assert program.outputs == program.arguments + 16  # and a table of both
  assert program.accessed > 0
  assert program.temporaries > 0
  assert [(shape.dtype, shape.dims) for shape in parse(program.proto).root.shapes] == [
    ("f32", (64, 64)),
    ("bf16", (8,)),
  ]
  asked, (request,) = compilers.topologies[0], compilers.requests
  assert (request["donated"], request["mesh"]) == ([0], [])
  if target == "h200":
    assert asked == {
      "platform": "cuda",
      "topology": "1x1x1",
      "target_config": get_target("h200").gpu_description(),
    }
    assert "autotune_level=0" in compilers.flags[0]
  else:
    assert asked == {"platform": "tpu", "topology_name": "v5e:1x1"}
    assert compilers.flags == [""]


def test_a_mesh_travels_with_the_types_of_its_axes(compilers):
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = mesh_of(kind, data=2, model=2)
    args = on(mesh, S((1024, 256), F32), "data"), on(mesh, S((256, 512), F32), None, "model")
    program = compile_step(lambda x, w: jnp.tanh(x @ w), args, [], get_target("v5e:2x2"))
    assert compilers.requests[-1]["mesh"] == [["data", 2, kind.name], ["model", 2, kind.name]]
    assert (program.arguments, program.outputs) == (
      4 * (256 * 512 // 2 + 1024 * 256 // 2),
      4 * 1024 * 512 // 4,
    )
  with pytest.raises(CompileError, match="the step runs on 16 devices, and the target has 8"):
    compile_step(jnp.tanh, (on(mesh_of(data=16), SQUARE),), [], get_target("v5e:4x4"))


def test_a_compiler_that_fails_is_quoted_and_a_gpu_is_tried_with_other_flags(compilers):
  args = double, (SQUARE, S((8,), jnp.bfloat16)), [], get_target("h200")
  compilers.failures = [(1, "warning\nINTERNAL: some error of Triton\n")]
  assert compile_step(*args).arguments
  assert ["triton" in flags for flags in compilers.flags] == [True, False]
  compilers.failures = [(1, "first"), (-6, "bad\nError: it is broken\nlast")]
  with pytest.raises(CompileError, match=r"^h200: Error: it is broken$") as raised:
    compile_step(*args)
  assert not raised.value.out_of_memory
  compilers.failures = [(-6, "")] * 2
  with pytest.raises(CompileError, match="h200: the compiler stopped without a message"):
    compile_step(*args)


def test_a_gpus_product_of_blocks_is_compiled_with_triton_which_alone_has_it(compilers, monkeypatch):
  monkeypatch.setattr(_worker, "_compile", lambda *_: {"error": "not on this machine"})
  compilers.platform = "cuda"
  for format in ("mxfp8", "nvfp4"):
    product = functools.partial(mpjax.scaled_dot, format=format)
    with pytest.raises(CompileError, match="not on this machine"):
      compile_step(product, (SQUARE, SQUARE), [], get_target("b200"))
    assert ["enable_triton_gemm=false" in flags for flags in compilers.flags[-2:]] == [False, True]


def test_a_step_that_is_refused_or_too_large_says_so(compilers, monkeypatch):
  unknown = lambda x: jax.ffi.ffi_call("no_such_call", SQUARE)(x) * 2
  with pytest.raises(CompileError, match=r"(?s)v5e.*no_such_call") as raised:
    compile_step(unknown, (SQUARE,), [], get_target("v5e"))
  assert not raised.value.out_of_memory
  error = "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory"
  monkeypatch.setattr(_worker, "_compile", lambda *_: {"error": error})
  before = len(compilers.flags)
  with pytest.raises(CompileError, match="h200: XlaRuntimeError: RESOURCE_EXHAUSTED") as raised:
    compile_step(jnp.tanh, (SQUARE,), [], get_target("h200"))
  assert raised.value.out_of_memory
  assert len(compilers.flags) == before + 1  # other flags would not help


def test_a_step_that_calls_this_machine_back_cannot_travel_and_is_planned_all_the_same(
  compilers, monkeypatch
):
  def prints(x):
    jax.debug.print("{}", x.sum())
    return 2 * x

  monkeypatch.setattr(planning, "missing", lambda _: "")
  for step in (prints, lambda x: jax.pure_callback(lambda x: x, SQUARE, x)):
    with pytest.raises(CompileError, match=r"^the step cannot be taken to v5e: "):
      compile_step(step, (SQUARE,), [], get_target("v5e"))
    plan = mpjax.plan(step, SQUARE, target="v5e")
    assert plan.compiled is None
    assert any(note.startswith("the compiler failed: the step cannot be taken to") for note in plan.notes)
  assert not compilers.requests


# By the devices' own compilers.

WIDTH, HIDDEN = 512, 2048
PARAMS = {"up": S((WIDTH, HIDDEN), F32), "down": S((HIDDEN, WIDTH), F32)}
residual_block = lambda params, x: x + jnp.tanh(x @ params["up"]) @ params["down"]


@for_devices
@pytest.mark.parametrize(("recipe", "dtype"), [("auto", "f8e4m3fn"), ("nvfp4", "f4e2m1fn")])
def test_blocks_are_multiplied_as_blocks_and_take_less_memory_than_bfloat16(recipe, dtype):
  blocks = mean_squares(lambda params, x: functools.reduce(lambda x, p: residual_block(p, x), params, x))
  args = [PARAMS] * 4, {name: S((4 * HIDDEN, WIDTH), F32) for name in ("x", "y")}
  plans = {
    policy: mpjax.plan(
      jax.grad(blocks), *args, policy={"base": policy, **fp8}, target=described("b200"), compile=True
    )
    for policy, fp8 in {"bf16": {}, "fp8": {"fp8": {"recipe": recipe, "first_layer": True}}}.items()
  }
  assert f"triton: {dtype} x {dtype}" in plans["fp8"].compiled.kernels
  assert plans["fp8"].compiled.temporaries < plans["bf16"].compiled.temporaries
