"""Which part of memory an argument of a step is, and how much of it lies on each device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import mpjax
from mpjax.planner import ARGUMENT_PARTS, tiled_bytes
from tests.planner._steps import BATCH, F32, PARAMS, SIZE, D, H, S, a_train_step, mesh_of, mlp, nbytes, on

WEIGHTS, OPTIMIZER, OTHER = "master weights", "optimizer state", "other state"
ADAM = optax.adam(1e-3)
MOMENTS = 2 * 4 * SIZE + 4  # two of float32, and a count
KEY = jax.eval_shape(lambda: jax.random.key(0))


def analytic(step, args, **options):
  return mpjax.plan(step, *args, compile=False, **options)


def arguments(plan):
  return {name: size for name, size in plan.memory.parts.items() if name in ARGUMENT_PARTS}


class State(NamedTuple):
  """As users of Haiku write it."""

  params: dict
  opt_state: tuple
  rng: jax.Array


def returns_first(*args):
  return args[0]


def named(names):
  """A function with parameters of these names."""
  scope = {}
  exec(f"def step({', '.join(names.split())}): return {names.split()[0]}", scope)
  return scope["step"]


MADE = jax.eval_shape(ADAM.init, PARAMS)
STATE = State(PARAMS, MADE, KEY)


class FlaxState(train_state.TrainState):
  """As users of Linen write it."""

  batch_stats: object = None


def made_by_flax():
  params, stats = jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS), {"mean": jnp.zeros(H)}
  return FlaxState.create(apply_fn=mlp, params=params, tx=ADAM, batch_stats=stats)


FLAX = jax.eval_shape(made_by_flax)
STATS = {"params": PARAMS, "batch_stats": {"mean": S((H,), F32)}}
DICT = {"params": PARAMS, "opt_state": MADE, "step": S((), jnp.int32)}
ALONE, TRAINED = {WEIGHTS: 4 * SIZE}, {WEIGHTS: 4 * SIZE, OPTIMIZER: MOMENTS}
MODEL = {"teacher": "model state"}
LAYERS = {"step": {"rng": PARAMS["w1"]}, "attention": {"key": PARAMS["w2"]}}
LAYERS |= {"rng": KEY, "key": S((2,), jnp.uint32), "dropout": {"step": S((), jnp.int32)}}
# Names of the parameters, arguments before the batch, options, and bytes by part.
NAMED = [
  ("params opt_state batch", (PARAMS, MADE), {}, TRAINED),
  ("weights o data", (PARAMS, MADE), {}, TRAINED),
  # The optimiser's state tells by its own type, the weights by having its structure.
  ("p s b", (PARAMS, MADE), {}, TRAINED),
  ("p s b", (PARAMS, MADE), {"donate_argnums": (0, 1)}, TRAINED),
  ("model batch", (PARAMS,), {}, ALONE),
  ("variables batch", (STATS,), {}, ALONE | {"model state": 4 * H}),
  ("state batch", (DICT,), {}, TRAINED | {OTHER: 4}),
  ("state batch", (STATE,), {}, TRAINED | {OTHER: 8}),
  ("carry batch", (STATE,), {}, TRAINED | {OTHER: 8}),
  ("state batch", (FLAX,), {}, TRAINED | {OTHER: 4, "model state": 4 * H}),
  ("params rng batch", (PARAMS, KEY), {}, ALONE | {OTHER: 8}),
  ("x y", (PARAMS,), {"parts": {"x": WEIGHTS}}, ALONE),
  ("x y", (PARAMS,), {"parts": {"0": WEIGHTS}}, ALONE),
  ("x y", (PARAMS,), {"parts": {0: WEIGHTS}}, ALONE),
  ("", (PARAMS,), {"parts": {"0": WEIGHTS}}, ALONE),
  ("params teacher batch", (PARAMS, PARAMS), {"parts": MODEL}, ALONE | {"model state": 4 * SIZE}),
  # Layers with the names of keys and counts.
  ("model batch", (LAYERS,), {}, ALONE | {OTHER: 20}),
]


def test_arguments_are_named_by_what_they_are():
  for names, args, options, want in NAMED:
    plan = analytic(named(names) if names else returns_first, (*args, BATCH), **options)
    assert arguments(plan) == want | {"batch": nbytes(BATCH)}, (names, options)
    assert (plan.parameters, plan.notes) == (SIZE, ()), (names, options)


def test_optimiser_state_is_told_by_slot_and_dtype():
  small = {"w": S((16, 8), F32), "b": S((8,), F32)}
  w, bias = 4 * 16 * 8, 4 * 8
  every = w + bias
  adam, momentum = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)
  moments = {"mu float32": every, "nu float32": every}
  each = optax.multi_transform({"adam": adam, "sgd": momentum}, {"w": "adam", "b": "sgd"})
  of_w = {"mu float32": w, "nu float32": w, "scalars": 4}
  of_half = {"mu bfloat16": every // 2, "nu float32": every, "scalars": 4}
  for name, tx, want in (
    ("adam", adam, moments | {"scalars": 4}),
    ("adam, half of it", optax.adam(1e-3, mu_dtype="bfloat16"), of_half),
    ("sgd", optax.sgd(0.1), {}),
    ("momentum", momentum, {"trace float32": every}),
    ("rmsprop", optax.rmsprop(1e-3), {"nu float32": every}),
    ("lion", optax.lion(1e-3), {"mu float32": every, "scalars": 4}),
    ("chain", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), moments | {"scalars": 4}),
    ("masked", optax.masked(adam, {"w": True, "b": False}), of_w),
    ("multi_transform", each, of_w | {"trace float32": bias}),
    ("MultiSteps", optax.MultiSteps(adam, 4), moments | {"acc_grads float32": every, "scalars": 12}),
    ("inject_hyperparams", optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), moments),
    ("dynamic loss scale", mpjax.dynamic_loss_scale(adam), moments),
  ):
    state = jax.eval_shape(tx.init, small)
    plan = analytic(named("params opt_state"), (small, state))
    found = dict(plan.memory.optimizer)
    if "scalars" not in want:
      found.pop("scalars", None)
    assert found == want, name
    assert plan.memory.parts.get(OPTIMIZER, 0) == nbytes(state), name


# Meshes. The plan is of one device.

VALUE_AND_GRAD = lambda params, batch: jax.value_and_grad(mlp)(params, batch)


def test_a_device_has_its_share_of_the_arguments():
  data, halves = mesh_of(data=8), mesh_of(data=4, tensor=2)
  flops = lambda plan: sum(product.flops for product in plan.products)
  for target, mesh, of_params, of_batch, weights, batch in (
    ("h200:8", data, (), ("data",), 1, 8),
    ("here", mesh_of(fsdp=8), ("fsdp",), ("fsdp",), 8, 8),
    ("h100:2x8", halves, (None, "tensor"), ("data",), 2, 4),
    ("h200:8", halves, ("tensor",), (("data", "tensor"),), 2, 8),
    ("h200:8", data, (), (), 1, 1),
  ):
    args = on(mesh, PARAMS, *of_params), on(mesh, BATCH, *of_batch)
    plan = analytic(VALUE_AND_GRAD, args, target=target)
    shares = {WEIGHTS: 4 * SIZE // weights, "batch": nbytes(BATCH) // batch}
    assert (plan.devices, arguments(plan)) == (8, shares), (target, of_params, of_batch)
    assert plan.parameters == SIZE  # of all devices together
    alone = analytic(VALUE_AND_GRAD, (PARAMS, BATCH), target=target)
    assert flops(plan) * 8 == flops(alone), (target, of_params, of_batch)
    assert any("give its arguments shardings" in note for note in plan.notes) == (target == "h100:2x8")


def test_weights_of_one_shape_have_together_the_bytes_of_their_shards():
  mesh = mesh_of(data=8)
  whole, divided = on(mesh, S((D, H), F32)), on(mesh, S((D, H), F32), "data")
  double = lambda params, batch: jax.tree.map(lambda x: 2 * x, params)
  for params in ([whole, divided, divided], [divided, divided, whole]):
    plan = analytic(double, (params, on(mesh, BATCH)), target="h200:8")
    assert plan.memory.parts["outputs"] == pytest.approx(plan.memory.parts[WEIGHTS], abs=3 * 8)
    assert plan.floor.moved_bytes == pytest.approx(2 * plan.memory.parts[WEIGHTS], abs=3 * 8)


def test_a_note_names_the_axes_over_which_a_compiler_gathers_weights():
  mesh, rows = mesh_of(data=2, fsdp=4), ("data", "fsdp")
  for axis, batch, noted in (("fsdp", rows, True), (None, rows, False), ("fsdp", "data", False)):
    args = on(mesh, PARAMS, axis), on(mesh, BATCH, batch)
    plan = analytic(jax.jit(jax.grad(mlp)), args, target="h200:8")
    notes = [note for note in plan.notes if note.kind == "gathered"]
    assert len(notes) == noted, (axis, batch)
    assert all("divided over fsdp: whole copies" in note and note in str(plan) for note in notes)


def test_collectives_of_data_parallel_training_are_its_gradients():
  step, state = a_train_step("fp32")
  mesh = mesh_of(data=8)  # of this machine's devices, as the compiler makes it
  plan = mpjax.plan(step, on(mesh, state), on(mesh, BATCH, "data"), compile=True)
  assert sum(arguments(plan).values()) == plan.compiled.arguments == nbytes(state) + nbytes(BATCH) // 8
  assert {(c.operation, c.dtype) for c in plan.collectives} == {("all-reduce", "float32")}
  moved = sum(c.nbytes for c in plan.collectives)
  assert 4 * SIZE <= moved <= 4 * SIZE + 64  # a few scalars: the loss, the norm of the gradients


def test_arguments_on_a_tpu_are_padded_to_tiles():
  plan = analytic(VALUE_AND_GRAD, (PARAMS, BATCH), target="v5e")
  assert plan.memory.parts[WEIGHTS] == sum(tiled_bytes(x.shape, x.dtype) for x in PARAMS.values()) >= 4 * SIZE


# Sizes of unusual arguments and results.


def test_any_argument_takes_what_jax_gives_it():
  step = lambda params, other: jax.tree.map(lambda x: x * 2, params)
  keys = [jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)) for impl in ("rbg", "threefry2x32")]
  sizes = [
    (0.5, 4),
    (3, 4),
    (True, 1),
    (np.zeros(10, np.int64), 40),
    (np.zeros(10), 40),
    (S((9,), jnp.int4), 5),
    (S((10,), jnp.int2), 3),
    (S((16,), jnp.uint2), 4),
  ]
  sizes += [(S((0, 3), F32), 0), (None, 0), (keys[0], 16), (keys[1], 8)]
  for argument, size in sizes:
    plan = analytic(step, (S((D, D), F32), argument))
    assert sum(arguments(plan).values()) == 4 * D * D + size, argument
  plan = mpjax.plan(step, S((D, D), F32), [argument for argument, _ in sizes], compile=True)
  assert sum(arguments(plan).values()) == plan.compiled.arguments
