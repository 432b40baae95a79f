"""Plans for described devices, compiled by the devices' own compilers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import ARGUMENT_PARTS, get_target
from mpjax.planner.compiled import _compile as compilers

pytestmark = [pytest.mark.aot, pytest.mark.optimised]

f32, bf16 = jnp.float32, jnp.bfloat16
BLOCKS, ROWS, WIDTH, HIDDEN = 1, 32768, 512, 2048
MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
WEIGHTS = BLOCKS * 2 * WIDTH * HIDDEN


def describe(target):
  """The name of a target, if this machine compiles for it."""
  if lacks := compilers.missing(get_target(target)):
    pytest.skip(lacks)
  return target


def training(dtype):
  """An AdamW step of a residual block that multiplies in a dtype."""
  tx = optax.adamw(1e-3)

  def loss(params, batch):
    x = batch["x"].astype(dtype)
    for block in params:
      x = x + jnp.tanh(x @ block["up"].astype(dtype)) @ block["down"].astype(dtype)
    return jnp.mean((x.astype(f32) - batch["y"]) ** 2)

  def step(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  return jax.jit(step, donate_argnums=(0, 1)), tx


def arguments(tx, mesh=None):
  place = lambda spec: None if mesh is None else NamedSharding(mesh, spec)
  whole, rows = place(PartitionSpec()), place(PartitionSpec("data"))
  weight = lambda *shape: jax.ShapeDtypeStruct(shape, f32, sharding=whole)
  params = [{"up": weight(WIDTH, HIDDEN), "down": weight(HIDDEN, WIDTH)} for _ in range(BLOCKS)]
  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(tx.init, params)
  )
  batch = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), f32, sharding=rows) for name in ("x", "y")}
  return params, state, batch


def argument_bytes(memory):
  return sum(memory.parts.get(part, 0) for part in ARGUMENT_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_plan_for_one_described_device(target):
  step, tx = training(bf16)
  plan = mpjax.plan(step, arguments(tx), target=describe(target), compile=True)
  compiled = plan.compiled
  weights, batch = 4 * WEIGHTS, 2 * 4 * ROWS * WIDTH
  assert plan.memory.parts["master weights"] == weights
  assert plan.memory.parts["batch"] == batch
  assert argument_bytes(plan.memory) == argument_bytes(compiled.memory) == compiled.arguments
  assert weights * 3 + batch < compiled.arguments < weights * 3 + batch + 1024  # and Adam's count
  assert compiled.aliases >= weights * 3
  assert compiled.peak == compiled.arguments + compiled.outputs - compiled.aliases + compiled.temporaries
  assert sum(compiled.memory.parts.values()) == compiled.peak == plan.peak
  assert compiled.explained > 0.9
  assert compiled.seconds > 0
  assert (plan.target, plan.devices, plan.collectives) == (target, 1, ())
  assert plan.floor.seconds > 0
  assert not any("compiler" in note for note in plan.notes)
  # Forward, and the gradients of weights and activations; the batch has none.
  flops = (3 * 2 * BLOCKS - 1) * 2 * ROWS * WIDTH * HIDDEN
  assert sum(plan.matrix_flops().values()) == flops
  assert sum(compiled.kernels.values()) == flops
  assert all("bf16" in kernel for kernel in compiled.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_plan_of_a_data_mesh(target):
  step, tx = training(f32)
  plan = mpjax.plan(step, arguments(tx, MESH), target=describe(target), compile=True)
  assert plan.devices == 4
  assert plan.memory.parts["master weights"] == 4 * WEIGHTS
  assert plan.memory.parts["batch"] == 2 * 4 * ROWS * WIDTH // 4
  assert argument_bytes(plan.memory) == plan.compiled.arguments
  (reduced,) = plan.collectives
  assert (reduced.operation, reduced.dtype) == ("all-reduce", "float32")
  # The gradients and the loss.
  assert 4 * WEIGHTS < reduced.nbytes <= 4 * WEIGHTS + 512
  # A floor: a ring sends more, and no network less than what each device must hear of.
  sent = plan.floor.parts["interconnect"] * get_target(target).interconnect
  assert reduced.nbytes / 2 <= sent <= 2 * reduced.nbytes * 3 / 4


TOO_LARGE = jax.ShapeDtypeStruct((1 << 17, 1 << 16), f32)  # 34 GB


@pytest.mark.slow
def test_step_that_does_not_fit_is_a_note_or_an_error():
  step = jax.jit(lambda x: jnp.cumsum(jnp.tanh(x), axis=0))
  plan = mpjax.plan(step, (TOO_LARGE,), target=describe("v5e"))
  assert plan.compiled is None
  assert plan.peak == plan.memory.peak > get_target("v5e").memory
  (note,) = [note for note in plan.notes if "the compiler failed" in note]
  assert "RESOURCE_EXHAUSTED" in note or "memory" in note
  with pytest.raises(compilers.CompileError, match=r"v5e: .*(RESOURCE_EXHAUSTED|memory)") as raised:
    mpjax.plan(step, (TOO_LARGE,), target="v5e", compile=True)
  assert raised.value.out_of_memory


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_step_that_the_compiler_refuses_is_a_note_or_an_error(target):
  shape = jax.ShapeDtypeStruct((8, 128), f32)
  unknown = lambda x: jax.ffi.ffi_call("no_such_call", shape)(x) * 2
  plan = mpjax.plan(unknown, (shape,), target=describe(target))
  assert plan.compiled is None
  assert [note for note in plan.notes if "the compiler failed" in note and "no_such_call" in note]
  with pytest.raises(compilers.CompileError, match=rf"(?s){target}.*no_such_call") as raised:
    mpjax.plan(unknown, (shape,), target=target, compile=True)
  assert not raised.value.out_of_memory


@pytest.mark.slow
def test_largest_batch_compiles_within_the_memory_and_the_next_does_not():
  target = describe("v5e")
  weight = jax.ShapeDtypeStruct((512, 2048), f32)
  # A TPU has 100 MB on the chip, which is too much for small steps to tell their batches apart.
  memory, multiple = 1_000_000_000, 16384

  def step(w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T)))(w)

  def plan_of(batch, compile):
    return mpjax.plan(step, (weight, jax.ShapeDtypeStruct((batch, 512), f32)), target=target, compile=compile)

  fit = mpjax.largest_batch(plan_of, memory, multiple=multiple)
  assert fit.batch % multiple == 0
  assert fit.next_batch == fit.batch + multiple
  assert fit.plan.compiled.peak <= memory < fit.next_peak
  assert dict(fit.tried) | {fit.batch: fit.plan.peak, fit.next_batch: fit.next_peak} == dict(fit.tried)
  assert len(fit.tried) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_the_branch_round_the_optimiser_is_the_cpus_alone(target):
  # In an accelerator's program it would keep selects from being fused, and memory from being reused.
  params = jax.ShapeDtypeStruct((WIDTH, WIDTH), f32)
  x = jax.ShapeDtypeStruct((WIDTH, WIDTH), f32)
  seen = []
  for branch in (True, False):
    tx = mpjax.with_loss_scaling(optax.adamw(1e-3), "dynamic", branch_on_cpu=branch)

    def step(params, state, x, tx=tx):
      loss = lambda p: jnp.mean(jnp.tanh(x.astype(jnp.float16) @ p.astype(jnp.float16)).astype(f32))
      grads = jax.grad(lambda p: mpjax.scale_loss(loss(p), state))(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    donated = range(1 + len(jax.tree.leaves(state)))
    program = compilers.compile_step(step, (params, state, x), donated, get_target(describe(target)))
    assert " conditional(" not in program.text
    seen.append((program.temporaries, program.aliases, program.text.count(" fusion(")))
  assert seen[0] == seen[1]
