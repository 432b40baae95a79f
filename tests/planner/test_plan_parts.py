"""Which part of memory an argument of a step is, how much of it lies on each device, and arguments that are no good."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from steps_under_test import (
  BATCH,
  F32,
  PARAMS,
  SIZE,
  B,
  H,
  S,
  a_train_step,
  abstract,
  mlp,
  nbytes,
)

import mpjax
from mpjax.planner import compile as compilers
from mpjax.planner.results import ARGUMENT_PARTS
from mpjax.planner.targets import get_target
from mpjax.planner.tiles import tiled_bytes

WEIGHTS, OPTIMIZER, OTHER = "master weights", "optimizer state", "other state"
ADAM = optax.adam(1e-3)
MOMENTS = 2 * 4 * SIZE + 4  # two of float32, and a count
KEY = jax.eval_shape(lambda: jax.random.key(0))


def analytic(step, args, **options):
  return mpjax.plan(step, args, compile=False, **options)


def arguments(plan):
  return {name: size for name, size in plan.memory.parts.items() if name in ARGUMENT_PARTS}


class State(NamedTuple):
  """As users of Haiku write it."""

  params: dict
  opt_state: tuple
  rng: jax.Array


def returns_first(*args):
  return args[0]


def named(*names):
  """A function with parameters of these names."""
  scope = {}
  exec(f"def step({', '.join(names)}): return {names[0]}", scope)
  return scope["step"]


MADE = abstract(ADAM.init, PARAMS)
STATE = State(PARAMS, MADE, KEY)
FLAX = abstract(
  lambda: train_state.TrainState.create(
    apply_fn=mlp, params=jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS), tx=ADAM
  )
)

NAMED = [
  (named("params", "opt_state", "batch"), (PARAMS, MADE, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS}),
  (named("weights", "o", "data"), (PARAMS, MADE, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS}),
  # The optimiser's state tells by its own type, the weights by having its structure.
  (named("p", "s", "b"), (PARAMS, MADE, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS}),
  (
    named("p", "s", "b"),
    (PARAMS, MADE, BATCH),
    {"donate_argnums": (0, 1)},
    {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS},
  ),
  (named("model", "batch"), (PARAMS, BATCH), {}, {WEIGHTS: 4 * SIZE}),
  (
    named("variables", "batch"),
    ({"params": PARAMS, "batch_stats": {"mean": S((H,), F32)}}, BATCH),
    {},
    {WEIGHTS: 4 * SIZE, "model state": 4 * H},
  ),
  (
    named("state", "batch"),
    ({"params": PARAMS, "opt_state": MADE, "step": S((), jnp.int32)}, BATCH),
    {},
    {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS, OTHER: 4},
  ),
  (named("state", "batch"), (STATE, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS, OTHER: 8}),
  (named("carry", "batch"), (STATE, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS, OTHER: 8}),
  (named("state", "batch"), (FLAX, BATCH), {}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS, OTHER: 4}),
  (named("params", "rng", "batch"), (PARAMS, KEY, BATCH), {}, {WEIGHTS: 4 * SIZE, OTHER: 8}),
  (named("x", "y"), (PARAMS, BATCH), {"parts": {"x": WEIGHTS}}, {WEIGHTS: 4 * SIZE}),
  (named("x", "y"), (PARAMS, BATCH), {"parts": {"0": WEIGHTS}}, {WEIGHTS: 4 * SIZE}),
  (named("x", "y"), (PARAMS, BATCH), {"parts": {0: WEIGHTS}}, {WEIGHTS: 4 * SIZE}),
  (returns_first, (PARAMS, BATCH), {"parts": {"0": WEIGHTS}}, {WEIGHTS: 4 * SIZE}),
  (
    named("params", "teacher", "batch"),
    (PARAMS, PARAMS, BATCH),
    {"parts": {"teacher": "model state"}},
    {WEIGHTS: 4 * SIZE, "model state": 4 * SIZE},
  ),
]


@pytest.mark.parametrize(("step", "args", "options", "want"), NAMED)
def test_arguments_are_named_by_what_they_are(step, args, options, want):
  plan = analytic(step, args, **options)
  assert arguments(plan) == want | {"batch": nbytes(BATCH)}
  assert plan.parameters == SIZE
  assert plan.checkpoint == sum(want.values())
  assert plan.notes == ()


W, BIAS = 16 * 8, 8
SMALL = {"w": S((16, 8), F32), "b": S((8,), F32)}
ALL = 4 * (W + BIAS)
SLOTS = {
  "adam": (optax.adam(1e-3), {"mu float32": ALL, "nu float32": ALL, "scalars": 4}),
  "adam, half of it": (
    optax.adam(1e-3, mu_dtype="bfloat16"),
    {"mu bfloat16": ALL // 2, "nu float32": ALL, "scalars": 4},
  ),
  "sgd": (optax.sgd(0.1), {}),
  "momentum": (optax.sgd(0.1, momentum=0.9), {"trace float32": ALL}),
  "rmsprop": (optax.rmsprop(1e-3), {"nu float32": ALL}),
  "lion": (optax.lion(1e-3), {"mu float32": ALL, "scalars": 4}),
  "chain": (
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    {"mu float32": ALL, "nu float32": ALL, "scalars": 4},
  ),
  "masked": (
    optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    {"mu float32": 4 * W, "nu float32": 4 * W, "scalars": 4},
  ),
  "multi_transform": (
    optax.multi_transform(
      {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)}, {"w": "adam", "b": "sgd"}
    ),
    {"mu float32": 4 * W, "nu float32": 4 * W, "trace float32": 4 * BIAS, "scalars": 4},
  ),
  "MultiSteps": (
    optax.MultiSteps(optax.adam(1e-3), 4),
    {"mu float32": ALL, "nu float32": ALL, "acc_grads float32": ALL, "scalars": 12},
  ),
  "inject_hyperparams": (
    optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    {"mu float32": ALL, "nu float32": ALL},
  ),
  "dynamic loss scale": (
    mpjax.dynamic_loss_scale(optax.adam(1e-3)),
    {"mu float32": ALL, "nu float32": ALL},
  ),
}


@pytest.mark.parametrize("name", SLOTS)
def test_optimiser_state_is_told_by_slot_and_dtype(name):
  tx, want = SLOTS[name]
  state = abstract(tx.init, SMALL)
  plan = analytic(named("params", "opt_state"), (SMALL, state))
  found = dict(plan.memory.optimizer)
  if "scalars" not in want:
    found.pop("scalars", None)
  assert found == want
  assert plan.memory.parts.get(OPTIMIZER, 0) == nbytes(state)


# Meshes. The plan is of one device.


def mesh_of(**axes):
  return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def on(mesh, tree, *spec):
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=sharding), tree)


VALUE_AND_GRAD = lambda params, batch: jax.value_and_grad(mlp)(params, batch)


@pytest.mark.parametrize(
  ("mesh", "of_params", "of_batch", "weights", "batch"),
  [
    (mesh_of(data=8), (), ("data",), 1, 8),
    (mesh_of(fsdp=8), ("fsdp",), ("fsdp",), 8, 8),
    (mesh_of(data=4, tensor=2), (None, "tensor"), ("data",), 2, 4),
    (mesh_of(data=4, tensor=2), ("tensor",), (("data", "tensor"),), 2, 8),
    (mesh_of(data=8), (), (), 1, 1),
  ],
)
@pytest.mark.parametrize("target", ["h200:8", "h100:2x8", "here"])
def test_a_device_has_its_share_of_the_arguments(mesh, of_params, of_batch, weights, batch, target):
  args = on(mesh, PARAMS, *of_params), on(mesh, BATCH, *of_batch)
  plan = analytic(VALUE_AND_GRAD, args, target=target)
  assert plan.devices == 8
  assert arguments(plan) == {WEIGHTS: 4 * SIZE // weights, "batch": nbytes(BATCH) // batch}
  assert plan.checkpoint == 4 * SIZE  # of all devices together
  assert plan.parameters == SIZE
  alone = analytic(VALUE_AND_GRAD, (PARAMS, BATCH), target=target)
  assert sum(p.flops for p in plan.products) * 8 == sum(p.flops for p in alone.products)
  assert any("give its arguments shardings" in note for note in plan.notes) == (target == "h100:2x8")


def test_gradients_of_replicated_weights_are_whole_on_each_device():
  mesh = mesh_of(data=8)
  step, state = a_train_step("fp32")
  shared = analytic(step, (on(mesh, state), on(mesh, BATCH, "data")), target="h200:8").memory
  alone = analytic(step, (state, BATCH), target="h200").memory
  assert shared.model_state == alone.model_state
  assert shared.saved_bytes * 8 == alone.saved_bytes == 4 * B * H
  # An eighth of the batch is left out, and of what depends on it.
  assert alone.peak - 7 * (nbytes(BATCH) + 2 * alone.saved_bytes) / 8 <= shared.peak < alone.peak


def test_collectives_of_data_parallel_training_are_its_gradients():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  step, state = a_train_step("fp32")
  plan = mpjax.plan(step, (on(mesh, state), on(mesh, BATCH, "data")), compile=True)
  assert sum(arguments(plan).values()) == plan.compiled.arguments
  assert {c.operation for c in plan.collectives} == {"all-reduce"}
  assert {c.dtype for c in plan.collectives} == {"float32"}
  moved = sum(c.nbytes for c in plan.collectives)
  assert 4 * SIZE <= moved <= 4 * SIZE + 64  # a few scalars: the loss, the norm of the gradients


def test_an_abstract_mesh_compiles_for_this_machines_devices():
  mesh = mesh_of(data=8)
  plan = mpjax.plan(VALUE_AND_GRAD, (on(mesh, PARAMS), on(mesh, BATCH, "data")), compile=True)
  assert plan.compiled.arguments == sum(arguments(plan).values()) == 4 * SIZE + nbytes(BATCH) // 8


def test_arguments_on_a_tpu_are_padded_to_tiles():
  plan = analytic(VALUE_AND_GRAD, (PARAMS, BATCH), target="v5e")
  assert plan.memory.parts[WEIGHTS] == sum(tiled_bytes(x.shape, x.dtype) for x in PARAMS.values()) >= 4 * SIZE
  assert plan.checkpoint == 4 * SIZE  # a file has no tiles


# What is refused.


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
    rf"cannot be traced at test_plan_parts.py:{fails_inside.__code__.co_firstlineno + 2}: TypeError: dot_general",
  ),
  "line of a jitted step": (
    jax.jit(fails_inside),
    ARGS,
    {},
    rf"cannot be traced at test_plan_parts.py:{fails_inside.__code__.co_firstlineno + 2}: TypeError: dot_general",
  ),
  "value": (
    fails_on_a_value,
    ARGS,
    {},
    rf"cannot be traced at test_plan_parts.py:{fails_on_a_value.__code__.co_firstlineno + 1}: Tracer",
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
    (EIGHT[0], on(mesh_of(data=4), BATCH)),
    {"target": "h200:8"},
    r"meshes of \[4, 8\] devices: expected one mesh",
  ),
  "mapping": (mlp, {"params": PARAMS}, {}, r"abstract_args of type dict: expected a tuple"),
  "one array": (mlp, S((2,), F32), {}, r"abstract_args of type ShapeDtypeStruct: expected a tuple"),
  "no function": (PARAMS, ARGS, {}, r"step of type dict: expected a function"),
  "unknown parameter": (
    mlp,
    ARGS,
    {"parts": {"weights": WEIGHTS}},
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
    (nnx.Optimizer(Module(), ADAM, wrt=nnx.Param),),
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
  assert "mpjax[" + extra in compilers.missing(get_target(target))
  plan = mpjax.plan(mlp, ARGS, target=target)
  assert plan.compiled is None
  assert plan.peak == plan.memory.peak
  [note] = [note for note in plan.notes if "pip install" in note]
  assert f'pip install "mpjax[{extra}]"' in note
  with pytest.raises(ValueError, match=rf"compile=True: .*mpjax\[{extra}\]"):
    mpjax.plan(mlp, ARGS, target=target, compile=True)


def test_a_step_that_the_compiler_gives_up_is_planned_all_the_same(monkeypatch):
  def gives_up(*args):
    raise compilers.CompileError("RESOURCE_EXHAUSTED: out of memory", out_of_memory=True)

  monkeypatch.setattr(compilers, "compile_step", gives_up)
  plan = mpjax.plan(mlp, ARGS)
  assert plan.compiled is None
  assert any("the compiler failed: RESOURCE_EXHAUSTED" in note for note in plan.notes)
  with pytest.raises(compilers.CompileError):
    mpjax.plan(mlp, ARGS, compile=True)
