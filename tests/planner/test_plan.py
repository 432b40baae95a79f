"""`mpjax.plan` of users' own steps: bytes against the compiler's and against counts by hand."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.planner import ARGUMENT_PARTS
from tests.planner import _steps
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
  by_parts,
  mlp,
  nbytes,
)

# Steps of users, with their arguments and by hand: bytes of weights, of optimiser state, options.


def with_optimizer(tx, params=PARAMS, loss=mlp, **options):
  opt_state = jax.eval_shape(tx.init, params)
  return _steps.training(loss, tx), (params, opt_state, BATCH), nbytes(params), nbytes(opt_state), options


def jitted_and_donated():
  step, args, weights, state, _ = with_optimizer(optax.adamw(1e-3))
  return jax.jit(step, donate_argnums=(0, 1)), args, weights, state, {}


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(D, H, rngs=rngs)
    self.norm = nnx.BatchNorm(H, rngs=rngs)
    self.down = nnx.Linear(H, OUT, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.relu(self.norm(self.up(x))))


def nnx_train_step():
  loss = _steps.mean_squares(lambda model, x: model(x))
  step = mpjax.make_train_step(loss, optax.adam(1e-3), "bf16")
  state = jax.eval_shape(lambda: step.init(Nnx(nnx.Rngs(0))))
  return step, (state, BATCH), nbytes(state.params), nbytes(state.opt_state), {}


def equinox_filter_jit():
  make = lambda: eqx.nn.MLP(D, OUT, H, 1, key=jax.random.key(0))
  arrays, static = eqx.partition(eqx.filter_eval_shape(make), lambda x: isinstance(x, S))
  loss = _steps.mean_squares(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x))
  step, *rest, _ = with_optimizer(optax.adamw(1e-3), arrays, loss)
  return eqx.filter_jit(step), *rest, {}


def branches_and_loops():
  def step(params, batch):
    changed = lambda: mlp(params, jax.tree.map(jnp.exp, batch))
    out = jax.lax.cond(batch["y"].sum() > 0, lambda: mlp(params, batch), changed)
    count, out = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, out))
    return jax.tree.map(lambda w: w * out, params), count

  return step, (PARAMS, BATCH), nbytes(PARAMS), 0, {}


STEPS = {
  "sgd": lambda: with_optimizer(optax.sgd(1e-2, momentum=0.9)),
  "sgd without state, donated": lambda: with_optimizer(optax.sgd(1e-2), donate_argnums=0),
  "adafactor": lambda: with_optimizer(optax.adafactor(1e-3), donate_argnums=(0, 1)),
  "jitted and donated": jitted_and_donated,
  "nnx": nnx_train_step,
  "equinox filter_jit": equinox_filter_jit,
  "scan over layers": lambda: with_optimizer(optax.adam(1e-3), S((3, D, D), F32), _steps.layers),
  "cond and while": branches_and_loops,
}


def assert_sizes_are_the_compilers(plan, step, args):
  outputs = jax.tree.leaves(jax.eval_shape(getattr(step, "jitted", step), *args))
  compiled = plan.compiled
  assert by_parts(plan, *ARGUMENT_PARTS) == compiled.arguments == nbytes(args)
  assert compiled.outputs == nbytes(outputs) + (8 * len(outputs) if len(outputs) > 1 else 0)
  assert compiled.peak == compiled.arguments + compiled.outputs - compiled.aliases + compiled.temporaries
  assert plan.peak == compiled.peak
  assert plan.memory.peak == sum(plan.memory.parts.values())
  of_arguments = [compiled.memory.parts.get(name, 0) for name in ARGUMENT_PARTS]
  assert sum(of_arguments) == compiled.arguments


@pytest.mark.parametrize("name", STEPS)
def test_sizes_of_a_users_step_are_the_compilers(name):
  step, args, weights, state, options = STEPS[name]()
  plan = mpjax.plan(step, *args, compile=True, **options)
  assert_sizes_are_the_compilers(plan, step, args)
  assert plan.target == "here"
  assert by_parts(plan, "master weights") == weights
  assert by_parts(plan, "optimizer state") == state == sum(plan.memory.optimizer.values())
  assert by_parts(plan, "batch") == nbytes(BATCH)


@pytest.mark.parametrize(("policy", "accumulate"), [("fp32", 1), ("fp16", 2), ("bf16_pure", 1), ("auto", 1)])
def test_sizes_of_a_train_step_are_the_compilers_under_each_policy(policy, accumulate):
  step, state = a_train_step(policy, accumulate=accumulate)
  plan = mpjax.plan(step, state, BATCH, compile=True)
  assert_sizes_are_the_compilers(plan, step, (state, BATCH))
  assert (plan.label, plan.parameters) == (policy, SIZE)


def test_weights_and_state_take_what_rules_of_thumb_say_and_nothing_is_allocated():
  wide = 1 << 16
  params = {"w1": S((wide, wide), F32), "w2": S((wide, 40_000), F32)}  # 6.9e9 parameters
  count, before = wide * (wide + 40_000), {id(x) for x in jax.live_arrays()}
  for policy, weights in (("fp32", 4), ("bf16", 4), ("fp16", 4), ("bf16_pure", 2)):
    step, state = a_train_step(policy, params=params)
    plan = mpjax.plan(step, state, {"x": S((16, wide), F32)}, target="h200", compile=False)
    of_state = plan.bytes_per_parameter("master weights", "optimizer state")
    assert of_state == pytest.approx(weights + 8, rel=0.01), policy
    assert (plan.label, plan.parameters) == (mpjax.get_policy(policy).label, count)
    assert plan.peak > (weights + 8) * count
  assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 1000


def sizes(saved):
  return {(row.operation, row.dtype, row.shape): (row.count, row.nbytes) for row in saved}


def deep(params, batch):
  x = batch["x"]
  for weight in params:
    x = jnp.tanh(x @ weight)
  return jnp.sum(x)


SQUARE = [S((D, D), F32)] * 3


def test_saved_activations_are_those_by_hand():
  for name, loss, params, want in (
    # The backward pass reads what tanh gave, for its slope and for the gradient of w2, and nothing else.
    ("two layers", mlp, PARAMS, {("tanh", "float32", (B, H)): (1, 4 * B * H)}),
    ("three layers", deep, SQUARE, {("tanh", "float32", (B, D)): (3, 3 * 4 * B * D)}),
    # A product alone saves its operands, which are arguments.
    ("a product", lambda params, batch: jnp.sum(batch["x"] @ params), S((D, H), F32), {}),
    ("computed again", jax.checkpoint(mlp), PARAMS, {}),
  ):
    step = functools.partial(lambda loss, params, batch: jax.value_and_grad(loss)(params, batch), loss)
    memory = mpjax.plan(step, params, BATCH, target="h200", compile=False).memory
    assert sizes(memory.saved) == want, name
    assert memory.saved_bytes == sum(size for _, size in want.values()), name


def test_saved_activations_under_autocast_are_in_half_precision():
  rows = 48
  batch, saved = {"x": S((rows, D), F32)}, {}
  for policy in ("fp32", "bf16"):
    step, state = a_train_step(policy, loss=deep, params=SQUARE)
    saved[policy] = mpjax.plan(step, state, batch, target="h200", compile=False).memory.saved
  assert sizes(saved["fp32"]) == {("tanh", "float32", (rows, D)): (3, 3 * 4 * rows * D)}
  # tanh is computed in float32, and again in the backward pass from the product's half-precision result.
  assert sizes(saved["bf16"]) == {
    ("dot_general", "bfloat16", (rows, D)): (3, 3 * 2 * rows * D),
    ("convert_element_type", "bfloat16", (rows, D)): (1, 2 * rows * D),  # the first layer's input
  }
  line = f"test_plan.py:{deep.__code__.co_firstlineno + 3}"
  assert {row.source for rows in saved.values() for row in rows} == {line, ""}  # a cast may be mpjax's own


@pytest.mark.parametrize("jitted", [False, True])
def test_a_policy_is_put_round_a_function_which_keeps_what_it_may_overwrite(jitted):
  step, args, _, _, _ = with_optimizer(optax.adam(1e-3))
  plan = lambda step, **options: mpjax.plan(step, *args, target="h200", compile=False, **options)
  given = jax.jit(step, donate_argnums=(0, 1)) if jitted else step
  options = {} if jitted else {"donate_argnums": (0, 1)}
  as_it_stands, half = plan(given, **options), plan(given, policy="bf16", **options)
  by_hand = plan(jax.jit(mpjax.autocast(step, "bf16"), donate_argnums=(0, 1)))
  assert set(as_it_stands.matrix_flops()) == {"tensorfloat32"}
  assert set(half.matrix_flops()) == {"bfloat16"}
  assert half.label == "bf16"
  assert half.memory == by_hand.memory


def test_a_policy_is_that_of_a_step_in_place_of_its_own():
  args = lambda step: (jax.eval_shape(step.init, PARAMS), BATCH)
  steps = {p: mpjax.make_train_step(mlp, optax.adam(1e-3), p) for p in ("fp32", "bf16_lean")}
  plans = {p: mpjax.plan(step, *args(step), target="h200", compile=False) for p, step in steps.items()}
  other = mpjax.plan(steps["fp32"], *args(steps["fp32"]), policy="bf16_lean", target="h200", compile=False)
  assert other == plans["bf16_lean"]
  assert other.memory != plans["fp32"].memory
