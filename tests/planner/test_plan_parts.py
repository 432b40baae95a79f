"""Which part of memory an argument of a step is, and how much of it lies on each device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import ARGUMENT_PARTS, get_target, tiled_bytes
from mpjax.planner.compiled import _compile as compilers
from tests.planner._steps import (
  BATCH,
  F32,
  PARAMS,
  SIZE,
  B,
  D,
  H,
  S,
  a_train_step,
  abstract,
  by_parts,
  mlp,
  nbytes,
)

pytestmark = pytest.mark.optimised
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
  assert shared.training_state == alone.training_state
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


def test_products_inside_shard_map_are_one_devices():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  local = lambda params, batch: jax.lax.psum(jnp.sum(batch @ params), "data")
  specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
  step = jax.shard_map(local, mesh=mesh, **specs)
  args = on(mesh, S((D, H), F32)), on(mesh, S((8 * B, D), F32), "data")
  [product] = analytic(step, args, parts={"0": WEIGHTS}).products
  assert product.shape == (B, H, D)
  assert product.flops == 2 * B * H * D


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h200:4", "v5e:2x2"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_either_kind_compiles(target, kind):
  if lacks := compilers.missing(get_target(target)):
    pytest.skip(lacks)
  mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(kind, kind))
  step = lambda params, batch: jnp.tanh(batch @ params)
  args = on(mesh, S((256, 512), F32), None, "model"), on(mesh, S((1024, 256), F32), "data")
  plan = mpjax.plan(step, args, target=target, compile=True)
  assert plan.devices == 4
  assert plan.compiled.arguments == 4 * (256 * 512 // 2 + 1024 * 256 // 2)
  assert plan.compiled.outputs == 4 * 1024 * 512 // 4


def test_arguments_on_a_tpu_are_padded_to_tiles():
  plan = analytic(VALUE_AND_GRAD, (PARAMS, BATCH), target="v5e")
  assert plan.memory.parts[WEIGHTS] == sum(tiled_bytes(x.shape, x.dtype) for x in PARAMS.values()) >= 4 * SIZE
  assert plan.checkpoint == 4 * SIZE  # a file has no tiles


# Sizes of unusual arguments and results.


@pytest.mark.parametrize(
  "result",
  [
    lambda x: x,
    lambda x: (2 * x, 2 * x),
    lambda x: (2 * x, (2 * x).T),
    lambda x: (1.0, 2 * x),
    lambda x: {"a": x, "b": x},
  ],
)
def test_results_that_are_one_value_have_memory_of_their_own(result):
  args = (S((D, D), F32),)
  plan = mpjax.plan(result, args, compile=True)
  outputs = jax.tree.leaves(jax.eval_shape(result, *args))
  assert plan.compiled.outputs == nbytes(outputs) + (8 * len(outputs) if len(outputs) > 1 else 0)
  assert plan.memory.peak >= nbytes(args) + plan.compiled.outputs


@pytest.mark.parametrize(
  "argument",
  [0.5, 3, True, np.zeros(10, np.int64), np.zeros(10), S((10,), jnp.int4), S((0, 3), F32), None]
  + [jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)) for impl in ("rbg", "threefry2x32")],
  ids=str,
)
def test_any_argument_takes_what_jax_gives_it(argument):
  step = lambda params, other: jax.tree.map(lambda x: x * 2, params)
  plan = mpjax.plan(step, (S((D, D), F32), argument), compile=True)
  assert by_parts(plan, *ARGUMENT_PARTS) == plan.compiled.arguments


def test_weights_are_served_in_the_compute_dtype():
  weights = {"w": S((D, H), F32), "complex": S((D,), jnp.complex64), "index": S((D,), jnp.int32)}
  step = lambda params, batch: (jax.tree.map(lambda x: x + 1, params), batch @ params["w"])
  plan = mpjax.plan(step, (weights, S((B, D), F32)), target="h200", policy="bf16", compile=False)
  assert plan.label == "bf16"
  assert plan.inference == 2 * D * H + 8 * D + 4 * D


RESULTS = {
  "random": lambda params, key: params * jax.random.normal(key, params.shape),
  "update": lambda params, key: params - 1,
  "product": lambda params, key: params @ params,
  "several": lambda params, key: (params @ params, params.sum(), params + 1),
  "cholesky": lambda params, key: jnp.linalg.cholesky(params @ params.T),
  "complex": lambda params, key: jnp.fft.fft(params).real,
}


@pytest.mark.parametrize("target", ["here", "h200", "v5e"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_in_the_peak_of_every_target(name, target):
  args = (S((256, 256), F32), KEY)
  plan = analytic(RESULTS[name], args, target=target)
  results = nbytes(jax.eval_shape(RESULTS[name], *args))
  assert plan.memory.peak >= sum(arguments(plan).values()) + results


@pytest.mark.parametrize("name", RESULTS)
def test_only_casts_of_weights_are_compute_copies(name):
  plan = analytic(RESULTS[name], (S((256, 256), F32), KEY), target="h200")
  assert "compute copies" not in plan.memory.parts
