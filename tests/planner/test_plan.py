"""`mpjax.plan` of users' own steps: bytes against the compiler's and against counts by hand."""

import math

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import ARGUMENT_PARTS, get_target, tiled_bytes
from mpjax.planner.compiled import _compile as compilers
from tests.planner._steps import (
  BATCH,
  F32,
  OUT,
  PARAMS,
  SIZE,
  B,
  D,
  H,
  S,
  a_train_step,
  abstract,
  by_parts,
  layers,
  mean_squares,
  mlp,
  nbytes,
  training,
)

pytestmark = pytest.mark.optimised
PRESETS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure", "auto")

# Steps of users, with their arguments and by hand: bytes of weights, of optimiser state, options.


def with_optimizer(tx, **options):
  opt_state = abstract(tx.init, PARAMS)
  return training(mlp, tx), (PARAMS, opt_state, BATCH), nbytes(PARAMS), nbytes(opt_state), options


def jitted_and_donated():
  step, args, weights, state, _ = with_optimizer(optax.adamw(1e-3))
  return jax.jit(step, donate_argnums=(0, 1)), args, weights, state, {}


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False)(nn.Dense(H)(x))
    return nn.Dense(OUT)(nn.relu(x))


class LinenState(train_state.TrainState):
  batch_stats: object = None


def linen():
  def create():
    variables = Linen().init(jax.random.key(0), jnp.zeros((B, D)))
    return LinenState.create(
      apply_fn=Linen().apply,
      params=variables["params"],
      tx=optax.adam(1e-3),
      batch_stats=variables["batch_stats"],
    )

  def step(state, batch):
    def loss(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      out, changed = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
      return jnp.mean((out - batch["y"]) ** 2), changed

    (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=changed["batch_stats"]), value

  state = abstract(create)
  return jax.jit(step, donate_argnums=0), (state, BATCH), nbytes(state.params), nbytes(state.opt_state), {}


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(D, H, rngs=rngs)
    self.norm = nnx.BatchNorm(H, rngs=rngs)
    self.down = nnx.Linear(H, OUT, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.relu(self.norm(self.up(x))))


def nnx_train_step():
  step = mpjax.make_train_step(mean_squares(lambda model, x: model(x)), optax.adam(1e-3), "bf16")
  state = abstract(lambda: step.init(Nnx(nnx.Rngs(0))))
  return step, (state, BATCH), nbytes(state.params), nbytes(state.opt_state), {}


def equinox():
  model = eqx.nn.MLP(D, OUT, H, 1, key=jax.random.key(0))
  arrays, static = eqx.partition(model, eqx.is_array)
  tx = optax.adamw(1e-3)
  loss = mean_squares(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x))
  opt_state = abstract(tx.init, arrays)
  step = training(loss, tx)

  def renamed(model, opt_state, batch):
    return step(model, opt_state, batch)

  return renamed, (arrays, opt_state, BATCH), nbytes(arrays), nbytes(opt_state), {"donate_argnums": (0, 1)}


def equinox_filter_jit():
  step, args, weights, state, _ = equinox()
  return eqx.filter_jit(step), args, weights, state, {}


def haiku():
  net = hk.transform(lambda x: hk.nets.MLP([H, OUT])(x))
  params = abstract(net.init, jax.random.key(0), jnp.zeros((B, D)))
  tx = optax.adam(1e-3)

  def step(params, opt_state, rng, batch):
    loss = mean_squares(lambda params, x: net.apply(params, rng, x))
    return training(loss, tx)(params, opt_state, batch)

  opt_state, rng = abstract(tx.init, params), abstract(lambda: jax.random.key(0))
  return step, (params, opt_state, rng, BATCH), nbytes(params), nbytes(opt_state), {"donate_argnums": (0, 1)}


def scanned():
  params = S((3, D, D), F32)
  tx = optax.adam(1e-3)
  opt_state = abstract(tx.init, params)
  return training(layers, tx), (params, opt_state, BATCH), nbytes(params), nbytes(opt_state), {}


def checkpointed():
  tx = optax.adam(1e-3)
  opt_state = abstract(tx.init, PARAMS)
  step = training(jax.checkpoint(mlp), tx)
  return step, (PARAMS, opt_state, BATCH), nbytes(PARAMS), nbytes(opt_state), {"donate_argnums": 0}


def branches_and_loops():
  def step(params, batch):
    out = jax.lax.cond(
      batch["y"].sum() > 0, lambda: mlp(params, batch), lambda: mlp(params, jax.tree.map(jnp.exp, batch))
    )
    count, out = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, out))
    return jax.tree.map(lambda w: w * out, params), count

  return step, (PARAMS, BATCH), nbytes(PARAMS), 0, {}


STEPS = {
  "adamw": lambda: with_optimizer(optax.adamw(1e-3)),
  "sgd": lambda: with_optimizer(optax.sgd(1e-2, momentum=0.9)),
  "sgd without state, donated": lambda: with_optimizer(optax.sgd(1e-2), donate_argnums=0),
  "adafactor": lambda: with_optimizer(optax.adafactor(1e-3), donate_argnums=(0, 1)),
  "jitted and donated": jitted_and_donated,
  "linen": linen,
  "nnx": nnx_train_step,
  "equinox": equinox,
  "equinox filter_jit": equinox_filter_jit,
  "haiku": haiku,
  "scan over layers": scanned,
  "jax.checkpoint": checkpointed,
  "cond and while": branches_and_loops,
}


def assert_sizes_are_the_compilers(plan, step, args):
  traced = getattr(step, "jitted", step)
  outputs = jax.tree.leaves(jax.eval_shape(traced, *args))
  table = 8 * len(outputs) if len(outputs) > 1 else 0
  compiled = plan.compiled
  assert by_parts(plan, *ARGUMENT_PARTS) == compiled.arguments == nbytes(args)
  assert compiled.outputs == nbytes(outputs) + table
  assert compiled.peak == compiled.arguments + compiled.outputs - compiled.aliases + compiled.temporaries
  assert plan.peak == compiled.peak
  assert plan.memory.peak == sum(plan.memory.parts.values())
  assert sum(compiled.memory.parts[name] for name in compiled.memory.parts if name in ARGUMENT_PARTS) == (
    compiled.arguments
  )


@pytest.mark.parametrize("name", STEPS)
def test_sizes_of_a_users_step_are_the_compilers(name):
  step, args, weights, state, options = STEPS[name]()
  plan = mpjax.plan(step, args, compile=True, **options)
  assert_sizes_are_the_compilers(plan, step, args)
  assert plan.target == "here"
  assert by_parts(plan, "master weights") == weights
  assert by_parts(plan, "optimizer state") == state == sum(plan.memory.optimizer.values())
  assert by_parts(plan, "batch") == nbytes(BATCH)
  assert plan.checkpoint == nbytes(args) - nbytes(BATCH)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", PRESETS)
def test_sizes_of_a_train_step_are_the_compilers_under_each_policy(policy, accumulate):
  step, state = a_train_step(policy, accumulate=accumulate)
  plan = mpjax.plan(step, (state, BATCH), compile=True)
  assert_sizes_are_the_compilers(plan, step, (state, BATCH))
  assert plan.label == policy
  assert plan.parameters == SIZE
  assert plan.checkpoint == nbytes(state)


def test_emulated_fp8_is_planned_as_it_is_traced():
  layers = {f"w{i}": S((128, 128), F32) for i in range(3)}

  def loss(params, batch):
    for weight in params.values():
      batch = jnp.tanh(batch @ weight)
    return batch.sum()

  policy = {"base": "fp8", "fp8": {"recipe": "current", "emulate": True}}
  step, state = a_train_step(policy, loss=loss, params=layers)
  plan = mpjax.plan(step, (state, S((128, 128), F32)), target="h200", compile=False)
  flops = plan.matrix_flops()
  # The layer in the middle, forward and twice backward; the first layer has one product less backward.
  product = 2 * 128**3
  eight_bit = sum(count for dtype, count in flops.items() if dtype.startswith("float8"))
  assert eight_bit == 3 * product
  assert flops["bfloat16"] == 5 * product


def bytes_on_a_tpu(tree):
  return sum(tiled_bytes(x.shape, x.dtype) for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
  ("target", "size_of", "table"), [("v5e", bytes_on_a_tpu, 512), ("h200", nbytes, 8 * 9)]
)
def test_sizes_are_the_compilers_of_a_device_that_is_not_there(target, size_of, table):
  if lacks := compilers.missing(get_target(target)):
    pytest.skip(lacks)
  step, state = a_train_step("bf16")
  plan = mpjax.plan(step, (state, BATCH), target=target, compile=True)
  compiled = plan.compiled
  outputs = jax.tree.leaves(jax.eval_shape(step.jitted, state, BATCH))
  assert len(outputs) == 9
  assert by_parts(plan, *ARGUMENT_PARTS) == compiled.arguments == size_of((state, BATCH))
  assert compiled.outputs == size_of(outputs) + table
  assert compiled.aliases == size_of(state)
  assert compiled.explained >= 0.9
  assert sum(compiled.kernels.values()) == 2 * (2 * B * D * H) + 3 * (2 * B * H * OUT)
  assert all("bf16 x bf16" in kernel for kernel in compiled.kernels)
  assert plan.checkpoint == nbytes(state)


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(("policy", "kernels"), [("bf16", "f32 x f32"), ("fp16", "f16 x f16")])
def test_a_compiler_widens_what_its_gpu_has_no_units_for(policy, kernels):
  if lacks := compilers.missing(get_target("t4")):
    pytest.skip(lacks)
  step, state = a_train_step(policy)
  plan = mpjax.plan(step, (state, BATCH), target="t4", compile=True)
  assert all(kernels in kernel for kernel in plan.compiled.kernels)
  assert plan.eligible == (policy == "fp16")


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_collectives_are_those_of_the_targets_compiler(target):
  if lacks := compilers.missing(get_target(target)):
    pytest.skip(lacks)
  mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
  put = lambda tree, *spec: jax.tree.map(
    lambda x: S(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))), tree
  )
  step, state = a_train_step("fp32")
  plan = mpjax.plan(step, (put(state), put(BATCH, "data")), target=target, compile=True)
  assert by_parts(plan, *ARGUMENT_PARTS) == plan.compiled.arguments
  assert {(c.operation, c.dtype) for c in plan.collectives} == {("all-reduce", "float32")}
  moved = sum(c.nbytes for c in plan.collectives)
  assert 4 * SIZE <= moved <= 4 * SIZE + 1024  # and a few scalars, each a tile on a TPU


@pytest.mark.parametrize(
  ("policy", "copies", "gradients", "weights", "served"),
  [
    ("fp32", 0, 4, 4, 4),
    ("bf16", 2, 4, 4, 2),
    ("fp16", 2, 4, 4, 2),
    ({"base": "bf16", "grad_dtype": "bfloat16"}, 2, 2, 4, 2),
    ("bf16_pure", 0, 2, 2, 2),
  ],
  ids=str,
)
def test_rules_of_thumb_come_out_for_adam(policy, copies, gradients, weights, served):
  step, state = a_train_step(policy)
  plan = mpjax.plan(step, (state, BATCH), target="h200", compile=False)
  per_parameter = {name: size / SIZE for name, size in plan.memory.training_state.items()}
  want = {"master weights": weights, "optimizer state": 8, "compute copies": copies, "gradients": gradients}
  assert per_parameter == pytest.approx({k: v for k, v in want.items() if v}, rel=0.01)
  assert sum(per_parameter.values()) == pytest.approx(weights + 8 + copies + gradients, rel=0.01)
  assert plan.bytes_per_parameter("master weights", "optimizer state") == pytest.approx(weights + 8, rel=0.01)
  assert plan.inference == served * SIZE
  assert plan.checkpoint == nbytes(state)


@pytest.mark.slow
def test_seven_billion_parameters_allocate_nothing():
  vocabulary, dim, hidden, depth = 32_000, 4096, 11_008, 32
  block = {"qkv": (dim, 3 * dim), "out": (dim, dim), "gate": (dim, hidden), "up": (dim, hidden)}
  block["down"] = (hidden, dim)
  shapes = {"embed": (vocabulary, dim), "head": (dim, vocabulary)}
  shapes |= {f"{i}/{name}": shape for i in range(depth) for name, shape in block.items()}
  count = sum(math.prod(shape) for shape in shapes.values())
  assert count == pytest.approx(6.7e9, rel=0.01)

  def loss(params, tokens):
    x = params["embed"][tokens]
    for i in range(depth):
      w = {name: params[f"{i}/{name}"] for name in block}
      q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 32, -1), 3, axis=-1)
      x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
      x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens).mean()

  before = {id(x) for x in jax.live_arrays()}
  for policy, total in (("fp32", 16), ("bf16", 18)):
    step, state = a_train_step(
      policy, loss=loss, params={name: S(shape, F32) for name, shape in shapes.items()}
    )
    plan = mpjax.plan(step, (state, S((1, 512), jnp.int32)), target="h200", compile=False)
    assert sum(plan.memory.training_state.values()) == pytest.approx(total * count, rel=0.01)
    assert plan.peak > 12 * count
  assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 1000


def sizes(saved):
  return {(row.operation, row.dtype, row.shape): (row.count, row.nbytes) for row in saved}


def deep(params, batch):
  x = batch["x"]
  for weight in params:
    x = jnp.tanh(x @ weight)
  return jnp.sum(x)


SQUARE = [S((D, D), F32)] * 3


@pytest.mark.parametrize(
  ("loss", "params", "want"),
  [
    # The backward pass reads what tanh gave, for its slope and for the gradient of w2, and nothing else.
    (mlp, PARAMS, {("tanh", "float32", (B, H)): (1, 4 * B * H)}),
    (deep, SQUARE, {("tanh", "float32", (B, D)): (3, 3 * 4 * B * D)}),
    # A product alone saves its operands, which are arguments.
    (lambda params, batch: jnp.sum(batch["x"] @ params), S((D, H), F32), {}),
    (jax.checkpoint(mlp), PARAMS, {}),
  ],
)
def test_saved_activations_are_those_by_hand(loss, params, want):
  step = lambda params, batch: jax.value_and_grad(loss)(params, batch)
  memory = mpjax.plan(step, (params, BATCH), target="h200", compile=False).memory
  assert sizes(memory.saved) == want
  assert memory.saved_bytes == sum(size for _, size in want.values())


@pytest.mark.parametrize("rows", [16, 48])
def test_saved_activations_under_autocast_are_in_half_precision(rows):
  batch = {"x": S((rows, D), F32)}
  saved = {}
  for policy in ("fp32", "bf16"):
    step, state = a_train_step(policy, loss=deep, params=SQUARE)
    saved[policy] = mpjax.plan(step, (state, batch), target="h200", compile=False).memory.saved
  assert sizes(saved["fp32"]) == {("tanh", "float32", (rows, D)): (3, 3 * 4 * rows * D)}
  # tanh is computed in float32, and again in the backward pass from the product's half-precision result; not the
  # last one, whose backward pass follows at once.
  assert sizes(saved["bf16"]) == {
    ("dot_general", "bfloat16", (rows, D)): (2, 2 * 2 * rows * D),
    ("tanh", "float32", (rows, D)): (1, 4 * rows * D),
    ("convert_element_type", "bfloat16", (rows, D)): (1, 2 * rows * D),  # the first layer's input
    ("convert_element_type", "bfloat16", (D, D)): (1, 2 * D * D),  # the last layer's weight
  }
  line = f"test_plan.py:{deep.__code__.co_firstlineno + 3}"
  assert {row.source for rows in saved.values() for row in rows} == {line, ""}  # a cast may be mpjax's own
